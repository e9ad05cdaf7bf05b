"""Measure what the documentation shows, and write its tables and pictures. Run it with `make figures`.

Every figure is one `daskps speedup`. Its JSON file, table and picture stand beside this script and are
committed. With --render nothing is measured: tables and pictures are made anew from the JSON files.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from daskps import _speedup_plot, _speedup_table, cli
from daskps._experiment import Results

FOLDER = Path(__file__).parent

FIGURES = {
    "fashion-mnist": "--data fashion-mnist --grid 1x1,1x2,2x1 --sync batch,epoch,8 --repeats 3",
    "epochs": "--data fashion-mnist --grid 2x1 --sync batch,epoch,8 --epochs 5 --repeats 1",
    "from-one": "--data fashion-mnist --rows 12800 --grid 1x1,2x1 --sync batch,epoch,8 --fit 1 --repeats 5",
    "emulated": (
        "--data synthetic --rows 6400 --emulate 200ms --grid 1x1,2x1,4x1,8x1,16x1"
        " --sync batch,epoch,8 --fit 1,2,4 --repeats 2"
    ),
    "large-batch": "--data fashion-mnist --grid 1x1,2x1 --sync batch --batch-size 256 --repeats 3",
}


def measure(name: str) -> None:
    """Run the command of a figure."""
    file = os.path.relpath(FOLDER / f"{name}.json")  # it becomes part of the file itself
    arguments = ["speedup", *shlex.split(FIGURES[name]), "--json", file]
    if cli.main(arguments):
        raise SystemExit(f"{name} could not be measured")


def command(name: str) -> str:
    """What to type for the same figures."""
    return f"daskps speedup {FIGURES[name]}"


def render(name: str) -> None:
    """Write the table and the picture, or in their place what to run."""
    file = FOLDER / f"{name}.json"
    if file.exists():
        results = Results.load(file)
        text = _speedup_table.markdown(results, command(name)) + f"\n![{name}](figures/{name}.png)\n"
        _speedup_plot.draw(results).savefig(FOLDER / f"{name}.png", dpi=110)
    else:
        note = "**Not measured yet.** `make figures` runs it and puts its table here."
        text = f"    {command(name)}\n\n{note}\n"
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Measure and render all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    options = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in options.names or FIGURES:
        if not options.render:
            measure(name)
        render(name)


if __name__ == "__main__":
    main()
