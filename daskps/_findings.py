"""What there is to say about a cluster before a fit uses it, and the table that says it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from daskps._crowding import Place, crowding

_WIDTH = 100

# A net of 16 million parameters takes so much for each rank, and once more for the results.
_BYTES_PER_RANK = 64 * 2**20


class Facts(NamedTuple):
    """What a process says of itself."""

    versions: dict[str, str]
    """By package; 'missing' for one that is not installed."""
    failed_imports: dict[str, str]
    """The error of every package that cannot be imported."""
    place: Place
    free_bytes: float


class Trip(NamedTuple):
    """How a rank's values travelled."""

    road: str
    seconds: float
    """From a contribution of a few kilobytes to the result."""


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    remedy: str = ""
    bad: bool = False


class CheckReport:
    """What `daskps.check` has found; its text is a table.

    Attributes
    ----------
    findings : list
        Each has ``what`` was looked at, what was ``found``, a ``remedy``, and whether it is ``bad``.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return not any(finding.bad for finding in self.findings)

    def __str__(self) -> str:
        width = max((len(finding.what) for finding in self.findings), default=0)
        return "\n".join(line for finding in self.findings for line in _lines(finding, width))

    __repr__ = __str__


def _lines(finding: Finding, width: int) -> list[str]:
    indent = " " * (5 + width + 2)
    first = f"{'BAD' if finding.bad else 'ok':5}{finding.what:{width}}  "
    lines = textwrap.wrap(finding.found, _WIDTH, initial_indent=first, subsequent_indent=indent)
    remedy = textwrap.wrap(finding.remedy, _WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=indent)
    return lines + remedy


def versions(by_process: Mapping[str, Facts], packages: Iterable[str]) -> Iterable[Finding]:
    """Whether all have the same; the first process is the one to follow."""
    for package in packages:
        found = {name: facts.versions[package] for name, facts in by_process.items()}
        first = next(iter(found.values()))
        others = {name: version for name, version in found.items() if version != first}
        if not others and first != "missing":
            yield Finding(package, first)
            continue
        who = ", ".join(f"{version} on {name}" for name, version in others.items())
        wanted = package if first == "missing" else f"{package}=={first}"
        yield Finding(
            package,
            f"{first} on {next(iter(found))}" + (f", {who}" if who else ""),
            f"install {wanted} everywhere and restart what runs",
            bad=True,
        )


def imports(by_process: Mapping[str, Facts]) -> Iterable[Finding]:
    """What cannot be imported, and where."""
    failed = [
        Finding("imports", f"{name}: {package}: {error}", f"repair {package} in that environment", bad=True)
        for name, facts in by_process.items()
        for package, error in facts.failed_imports.items()
    ]
    return failed or [Finding("imports", "all packages can be imported")]


def threads(workers: Mapping[str, Facts]) -> Finding:
    """Whether every thread of a worker has a core."""
    places = [facts.place for facts in workers.values()]
    crowded = crowding(places)
    if crowded:
        found, _, remedy = crowded.partition(": ")
        return Finding("threads", found, remedy, bad=True)
    return Finding("threads", f"{sum(place.threads for place in places)}, and a core for each")


def memory(scheduler: Facts, n_workers: int) -> Finding:
    """Whether buffers that ranks share with the scheduler are likely to fit."""
    found = f"{scheduler.free_bytes / 2**30:.1f} GiB free at the scheduler"
    if scheduler.free_bytes < _BYTES_PER_RANK * (n_workers + 1):
        remedy = "a large net's ranks will use connections instead: free memory or use fewer workers"
        return Finding("memory", found, remedy, bad=True)
    return Finding("memory", found)


def encryption(address: str) -> Finding:
    """Who can use a scheduler of this address."""
    if address.startswith("tls://"):
        return Finding("encryption", "TLS: only who has the certificates gets in")
    return Finding(
        "encryption",
        f"none on {address}",
        "whoever can connect may run code: on a network that others use, give the cluster"
        " distributed.Security",
    )


def roads(trips: Mapping[str, Trip], allowed: str) -> Iterable[Finding]:
    """How the values of every worker travel."""
    for address, trip in trips.items():
        if trip.road == "none":
            yield Finding("transport", f"{address}: the only worker, which exchanges nothing")
            continue
        remedy = ""
        if trip.road.startswith("comm") and allowed != "comm":
            remedy = "on the scheduler's host, and as its user, it would be shared memory"
        found = f"{address}: {trip.road}, {trip.seconds * 1000:.2f} ms for a round trip"
        yield Finding("transport", found, remedy)


def silent(answers: Mapping[str, object]) -> Iterable[Finding]:
    """Who has not said what it was asked, and why."""
    for name, error in answers.items():
        if isinstance(error, TimeoutError):
            found, remedy = "no answer", "see whether it is stopped or cut off, and restart it"
        elif isinstance(error, (ImportError, AttributeError)):
            found, remedy = f"cannot load daskps: {error}", "install daskps there and restart it"
        else:
            found, remedy = f"{type(error).__name__}: {error}", "see its log"
        yield Finding(name, found, remedy, bad=True)
