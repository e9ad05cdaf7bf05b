"""Training over a wire slower than memory: python asv_bench/slow_wire.py [--rate 1gbit]

The script runs itself in a network namespace of its own, whose loopback device lets through no more than
the given rate: contributions one after the other and then results, as the port of a scheduler's host would.
Linux, with unshare and tc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks.contenders import Contender
from benchmarks.turns import table, take_turns

from daskps import _machine

BFLOAT16 = {"DASK_DASKPS__WIRE_DTYPE": "bfloat16"}
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}

CONTENDERS: dict[str, Contender] = {
    "skorch, 1 thread": ("skorch", [1], {}),
    "DDP, gloo": ("pair", ["ddp"], ON_LOOPBACK),
    "daskps batch": ("daskps", ["batch", "comm"], {}),
    "daskps batch, bfloat16": ("daskps", ["batch", "comm"], BFLOAT16),
    "daskps H=8": ("daskps", [8, "comm"], {}),
    "daskps H=8, bfloat16": ("daskps", [8, "comm"], BFLOAT16),
    "daskps epoch": ("daskps", ["epoch", "comm"], {}),
}

_INSIDE = "--inside"


def enter_slow_network(rate: str) -> None:
    """Start this script again where the wire is slow; does not return."""
    again = (
        "ip link set lo up"
        f" && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 200ms"
        ' && exec "$@"'
    )
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", again, "sh"]
    os.execvp("unshare", [*command, sys.executable, *sys.argv, _INSIDE])


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="as tc writes it")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rows", type=int, default=3200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        enter_slow_network(options.rate)
    print(", ".join(f"{key} {value}" for key, value in _machine.describe().items()))
    wire = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True)
    print(wire.stdout.strip())
    for batch_size in options.batches:
        outcomes = take_turns(CONTENDERS, batch_size, options.rows, options.repeats)
        print(f"\nglobal batch of {batch_size} rows, {options.rows} rows an epoch")
        print(table(outcomes, {"/skorch": ("skorch, 1 thread",)}), flush=True)


if __name__ == "__main__":
    main()
