"""Batch synchronisation beside what else one could do with two cores: python asv_bench/peers.py

Every contender trains the same CNN on the same rows in processes of its own. They take turns, and every
figure is the median of several turns, since other programs disturb a machine for minutes at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks import contenders

from daskps import _machine


def turns(batch_size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Let every contender run once in every turn."""
    figures: dict[str, list[float]] = {}
    for turn in range(options.repeats):
        for name in contenders.LINEUP:
            if options.only and options.only not in name:
                continue
            value = contenders.images_per_second(name, batch_size, options.rows)
            figures.setdefault(name, []).append(value)
            print(f"batch {batch_size}, turn {turn + 1}: {name:<36}{value:>8.0f} images/s", flush=True)
    return figures


def table(figures: dict[str, list[float]]) -> str:
    """Medians and spreads, and each median over plain skorch, DDP and the ceiling."""
    medians = {name: statistics.median(values) for name, values in figures.items()}

    def best(*names: str) -> float:
        return max((medians[name] for name in names if name in medians), default=float("nan"))

    base = best("skorch, 1 thread")
    ddp = best("DDP, gloo", "DDP, gloo, tuned")
    ceiling = best("2 loops that never talk, tuned")
    lines = [f"{'':<36}{'images/s':>9}{'min':>7}{'max':>7}{'/skorch':>9}{'/DDP':>7}{'/ceiling':>10}"]
    for name, values in figures.items():
        m = medians[name]
        lines.append(
            f"{name:<36}{m:>9.0f}{min(values):>7.0f}{max(values):>7.0f}"
            f"{m / base:>9.2f}{m / ddp:>7.2f}{m / ceiling:>10.2f}"
        )
    return "\n".join(lines)


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
    figures = {batch_size: turns(batch_size, options) for batch_size in options.batches}
    for batch_size, measured in figures.items():
        print(f"\nglobal batch of {batch_size} rows, {options.rows} rows an epoch\n{table(measured)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "images_per_second": figures}, file, indent=1)


if __name__ == "__main__":
    main()
