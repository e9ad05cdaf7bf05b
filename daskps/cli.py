"""The command line: ``daskps demo``, ``daskps speedup`` and ``daskps check``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import daskps

EPOCHS = {"digits": 10, "fashion-mnist": 3}
DATA = ("digits", "fashion-mnist", "synthetic")

# The part of an emulated step that does not shrink with its rows, unless it is said.
_FIXED_SHARE = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["daskps", *arguments])
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        print("daskps: stopped", file=sys.stderr)
        return 130
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(f"daskps: {error}", file=sys.stderr)
        return 1


def _demo(options: argparse.Namespace) -> None:
    from daskps._demo import demo

    demo(options.data, options.workers, options.epochs or EPOCHS[options.data])


def _speedup(options: argparse.Namespace) -> None:
    from daskps import _experiment, _speedup_table, _trial

    _check_files(options)
    _check_data(options.data)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        results = _experiment.measure(_plan(options), options.command_line, _trial.in_a_process, _note)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(_speedup_table.text(results))
    if options.json:
        results.save(options.json)
    if options.plot:
        from daskps import _speedup_plot

        _speedup_plot.draw(results).savefig(options.plot, dpi=120)


def _leave(number: int, frame: Any) -> None:
    """As an exception, so that the processes of a trial are ended too."""
    sys.exit(128 + number)


def _check(options: argparse.Namespace) -> int:
    from daskps._check import check

    report = check(options.address)
    print(report)
    return 0 if report.ok else 1


def _plan(options: argparse.Namespace) -> Any:
    from daskps._experiment import Cell, Plan
    from daskps._trial import Trial

    emulate = options.emulate
    base = Trial(
        options.data,
        options.rows,
        options.batch_size,
        options.epochs,
        emulate=None if emulate is None else (emulate[0], emulate[1] / options.batch_size),
    )
    grid = tuple(Cell(*cell) for cell in options.grid)
    unknown = set(options.fit) - {cell.workers for cell in grid}
    if unknown:
        raise ValueError(f"--fit names {sorted(unknown)} workers, which are not in --grid.")
    return Plan(base, grid, tuple(options.sync), options.repeats, tuple(options.fit))


def _check_files(options: argparse.Namespace) -> None:
    """Before an hour's work, not after it."""
    if options.plot:
        from daskps._drawing import pyplot

        known = pyplot().Figure().canvas.get_supported_filetypes()
        kind = os.path.splitext(options.plot)[1].lstrip(".")
        if kind and kind not in known:  # without one matplotlib draws a PNG
            raise ValueError(
                f"cannot draw to {options.plot}: {kind!r} is none of {', '.join(sorted(known))}."
            )
    for file in filter(None, (options.json, options.plot)):
        folder = os.path.dirname(os.path.abspath(file))
        if os.path.isdir(file):
            raise ValueError(f"cannot write {file}: it is a folder.")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {file}: {folder} is no folder that can be written to.")


def _check_data(name: str) -> None:
    """Here, since what a fit's own process says of missing files is buried in its traceback."""
    if name == "fashion-mnist":
        daskps.datasets.load_fashion_mnist()


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="daskps", description="Train one network on a Dask cluster.")
    parser.add_argument("--version", action="version", version=f"daskps {daskps.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_speedup(commands)
    _add_check(commands)
    return parser


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo", help="train a CNN in one process and on a local cluster, and compare"
    )
    command.set_defaults(run=_demo)
    add = command.add_argument
    add("--data", choices=sorted(EPOCHS), default="digits", help="what to train on; %(default)s by default")
    add(
        "--workers",
        type=_positive,
        default=2,
        metavar="K",
        help="of one thread each; %(default)s by default",
    )
    epochs = ", ".join(f"{n} for {data}" for data, n in EPOCHS.items())
    add("--epochs", type=_positive, metavar="N", help=f"of each training; by default {epochs}")


def _add_check(commands: Any) -> None:
    command = commands.add_parser("check", help="see whether a cluster can train, and what to mend")
    command.set_defaults(run=_check)
    command.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="of a scheduler; a private cluster, as fit would use, if there is none",
    )


def _add_speedup(commands: Any) -> None:
    command = commands.add_parser(
        "speedup", help="measure the speedup over plain skorch on one core, and predict it"
    )
    command.set_defaults(run=_speedup)
    add = command.add_argument
    add("--data", choices=DATA, default="digits", help="what to train on; %(default)s by default")
    add("--rows", type=_positive, metavar="N", help="training rows; all by default")
    grid, modes = "1x1,2x1", "batch,epoch,8"
    what = "workers x threads of each; %(default)s by default"
    add("--grid", type=_list(_cell), default=grid, metavar="KxT,...", help=what)
    what = "batch, epoch or numbers of steps between averages; %(default)s by default"
    add("--sync", type=_list(_mode), default=modes, metavar="MODE,...", help=what)
    what = "rows of an optimizer step; %(default)s by default"
    add("--batch-size", type=_positive, default=32, metavar="N", help=what)
    add("--epochs", type=_positive, default=1, metavar="N", help="of a fit; %(default)s by default")
    what = "turns, in each of which all run once; %(default)s by default"
    add("--repeats", type=_positive, default=3, metavar="N", help=what)
    add(
        "--fit",
        type=_list(_positive),
        default=[],
        metavar="K,...",
        help="fit the model to these numbers of workers only, and predict the others;"
        " for 1 alone, half the batch is measured too, and what two ranks do to each other",
    )
    add(
        "--emulate",
        type=_wait,
        metavar="20ms",
        help="wait so long for a batch in place of computing, a tenth of it for any number of rows;"
        " or 2ms+18ms to say both parts",
    )
    add("--json", metavar="F", help="write all that was measured to this file")
    add("--plot", metavar="F.png", help="draw to this file")


def _list(of: Callable[[str], Any]) -> Callable[[str], list]:
    def parse(text: str) -> list:
        return list(dict.fromkeys(of(part) for part in text.split(",")))

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _cell(text: str) -> tuple[int, int]:
    workers, x, threads = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"{text!r} is not workers x threads, such as 2x1")
    return _positive(workers), _positive(threads)


def _mode(text: str) -> str | int:
    if text in ("batch", "epoch"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 'batch', 'epoch' or an integer >= 1")
    return int(text)


def _wait(text: str) -> tuple[float, float]:
    """Seconds of a step in any case, and of all rows of a batch."""
    from dask.utils import parse_timedelta

    try:
        parts = [float(parse_timedelta(part)) for part in text.split("+")]
    except (KeyError, ValueError):
        parts = []
    if len(parts) not in (1, 2) or min(parts) < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration such as 20ms, or two such as 2ms+18ms"
        )
    if len(parts) == 2:
        return parts[0], parts[1]
    return _FIXED_SHARE * parts[0], (1 - _FIXED_SHARE) * parts[0]
