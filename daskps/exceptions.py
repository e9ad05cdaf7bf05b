"""What can go wrong in a fit, one class for each thing that a caller may want to tell apart."""

from __future__ import annotations


class DaskpsError(RuntimeError):
    """Base of all errors that daskps raises about a cluster or a run."""


class InstallationError(DaskpsError):
    """daskps is missing, or of another version, on the scheduler or on a worker."""


class ClusterTooSmallError(DaskpsError):
    """Fewer usable workers came than the fit asked for, within ``daskps.timeouts.workers``."""


class WorkerLostError(DaskpsError):
    """A worker that held a rank left the cluster during a fit.

    Parameters
    ----------
    reason : str
    worker : str, optional
        Its address.
    run_id : str, optional
    epoch : int, optional
        Counted from 0.
    round : int, optional
        Of the parameter server, counted from 0 since the workers were last put together.
    """

    def __init__(
        self,
        reason: str = "",
        worker: str | None = None,
        run_id: str | None = None,
        epoch: int | None = None,
        round: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.worker = worker
        self.run_id = run_id
        self.epoch = epoch
        self.round = round


class WorkerBusyError(DaskpsError):
    """A worker was busy with other tasks, or paused, for ``daskps.timeouts.start``, and a rank needs it."""


class RoundTimeoutError(DaskpsError):
    """A round of the parameter server was not complete within ``daskps.timeouts.round``."""


class DivergenceError(DaskpsError):
    """A loss, a gradient or a parameter became NaN or infinite, with ``daskps.on-divergence: raise``."""


class RunAbortedError(DaskpsError):
    """A rank left because its run ended elsewhere: a consequence, never the cause."""


class StoppedError(DaskpsError):
    """A callback on a rank raised KeyboardInterrupt; to the caller it is one again."""


class StaleMessageError(DaskpsError):
    """A message of a run, a generation or a round that is over."""


class InvalidMessageError(DaskpsError):
    """A message that the protocol does not allow at this point."""
