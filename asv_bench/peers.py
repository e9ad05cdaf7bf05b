"""Batch synchronisation beside what else one could do with two cores: python asv_bench/peers.py

Every contender trains the same CNN for two epochs on the same rows, in processes of its own. The speed is
that of the second epoch; accuracies are those after it, on the rows that were trained on and on the test
rows. Of two that share nothing, the first is scored.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.contenders import LINEUP
from benchmarks.turns import table, take_turns

from daskps import _machine

BASES = {
    "/skorch": ("skorch, 1 thread",),
    "/DDP": ("DDP, gloo", "DDP, gloo, tuned"),
    "/ceiling": ("2 loops that never talk, tuned",),
}


def main() -> None:
    """Run all contenders in turn and print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rows", type=int, default=12_800)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose name has this in it")
    parser.add_argument("--json", metavar="F", help="write all figures to this file")
    options = parser.parse_args()
    machine = _machine.describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    lineup = {name: contender for name, contender in LINEUP.items() if options.only in name}
    outcomes = {size: take_turns(lineup, size, options.rows, options.repeats) for size in options.batches}
    for size, reached in outcomes.items():
        print(f"\nglobal batch of {size} rows, {options.rows} rows an epoch\n{table(reached, BASES)}")
    if options.json:
        as_dicts = {
            size: {name: [turn._asdict() for turn in turns] for name, turns in reached.items()}
            for size, reached in outcomes.items()
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "outcomes": as_dicts}, file, indent=1)


if __name__ == "__main__":
    main()
