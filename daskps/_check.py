"""Whether a cluster can train, found out by asking all of it and by a few rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

import dask
from distributed import Client, Future

from daskps import _facts, _findings, config
from daskps._cluster import client_for
from daskps._findings import CheckReport, Facts, Finding, Trip
from daskps._late import Late
from daskps._launch import PRIORITY, Run, open_run
from daskps.exceptions import DaskpsError

# For each of: an answer, for which a worker may have to import torch; free workers; the rounds.
_SECONDS = 60.0


def check(client: Client | str | None = None) -> CheckReport:
    """See whether a cluster can train: versions, imports, threads, transport, memory.

    A run of a few rounds is made on all workers that are free.

    Parameters
    ----------
    client : distributed.Client or str, optional
        A client or the address of a scheduler. By default the current client and, if there is none, a
        private cluster, as for `DistributedCNNClassifier`.

    Returns
    -------
    CheckReport
        ``ok`` is whether nothing is bad; printed, it is a table with a remedy for what is. Its
        ``findings`` have ``what`` was looked at, what was ``found``, a ``remedy``, and whether it is
        ``bad``.

    Raises
    ------
    OSError
        If nobody answers at the address.
    DaskpsError
        If the client cannot be used, or the scheduler does not answer for a minute.
    TypeError, ValueError
        If ``client`` is no client and no address.
    """
    with client_for(client) as used:
        return CheckReport(_findings_of(used))


def _findings_of(client: Client) -> Iterator[Finding]:
    answers = client.sync(_ask_all, client)
    known = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    workers = {name: facts for name, facts in known.items() if name not in ("client", "scheduler")}
    yield from _findings.silent({n: answer for n, answer in answers.items() if n not in known})
    yield from _findings.versions(known, _facts.SHARED)
    training = {"client": known["client"], **workers}
    yield from _findings.versions(training, _facts.TRAINING)
    yield from _findings.imports(workers)
    yield _findings.encryption(str(getattr(client.scheduler, "address", "")))
    if not workers:
        yield Finding("workers", "none that answers", "start some, or see their logs", bad=True)
        return
    yield _findings.threads(workers)
    if "scheduler" in known:
        yield _findings.memory(known["scheduler"], len(workers))
        yield from _tried(client, list(workers))


async def _ask_all(client: Client) -> dict[str, Any]:
    """The facts of all processes, or an exception in their place."""
    scheduler: Any = client.scheduler
    try:
        addresses = list(await asyncio.wait_for(scheduler.ncores(), _SECONDS))
    except TimeoutError:
        raise DaskpsError(f"the scheduler {scheduler.address} did not answer for {_SECONDS:g} s") from None
    asked: dict[str, Callable] = {
        "scheduler": partial(client.run_on_scheduler, _facts.of_scheduler),
        **{address: partial(_of_worker, client, address) for address in addresses},
    }
    answers = await asyncio.gather(*(_ask(function) for function in asked.values()))
    return {"client": _facts.facts(), **dict(zip(asked, answers, strict=True))}


async def _of_worker(client: Client, address: str, **kwargs: Any) -> Any:
    return (await client.run(_facts.of_worker, workers=[address], **kwargs))[address]


async def _ask(function: Callable) -> Any:
    try:
        return await asyncio.wait_for(function(asynchronous=True), _SECONDS)
    except Exception as error:
        return error


def _tried(client: Client, addresses: list[str]) -> list[Finding]:
    """What comes of a few rounds."""
    short = {f"daskps.timeouts.{name}": f"{_SECONDS}s" for name in ("workers", "round", "connect", "close")}
    try:
        with (
            dask.config.set(short),
            dask.annotate(workers=addresses),
            open_run(client, None, len(addresses), at_most=_SECONDS) as run,
        ):
            return list(_findings.roads(_trips(run), config.get("transport")))
    except TimeoutError:
        busy = "fits hold the workers: nothing was tried"
        return [Finding("transport", busy, "look again when they have ended")]
    except DaskpsError as error:
        return [Finding("transport", str(error), "see the logs of the workers", bad=True)]


def _trips(run: Run) -> dict[str, Trip]:
    futures = [_submit(run, rank) for rank in range(run.world_size)]
    try:
        # The server of the rounds gives up first, and says for whom it waited.
        deadline = monotonic() + 3 * _SECONDS
        trips = [future.result(timeout=max(0.0, deadline - monotonic())) for future in futures]
        return dict(zip(run.addresses, trips, strict=True))
    except TimeoutError:
        late = [a for a, future in zip(run.addresses, futures, strict=True) if not future.done()]
        raise DaskpsError(f"{late} did not exchange values within {3 * _SECONDS:g} s") from None
    finally:
        run.client.cancel([future for future in futures if not future.done()])
        for future in futures:
            future.release()


def _submit(run: Run, rank: int) -> Future:
    with dask.annotate(retries=0, allow_other_workers=False):
        return run.client.submit(
            Late("daskps._probe", "probe"),
            run.ticket(rank),
            run.rules,
            workers=[run.addresses[rank]],
            priority=PRIORITY,
            pure=False,
            key=f"daskps-check-{run.run_id}-{rank}",
        )
