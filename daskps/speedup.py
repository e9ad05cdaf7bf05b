"""How long a fit takes on K workers: a model with four coefficients, fitted to what ranks measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

COEFFICIENTS = ("c0", "c1", "s0", "s1")

# Row counts closer than this say too little of what a step costs without rows.
_LEVERAGE = 1.25


@dataclass(frozen=True)
class SpeedupModel:
    """Runtime of a fit on K workers, and the speedup that follows.

    A step of r rows computes for c0 + c1 r seconds. When K > 1 ranks meet, they wait and move data for
    S(K) = s0 + s1 K seconds; one rank meets nobody. So a batch of b rows takes

    - ``sync_every="batch"``: c0 + c1 b/K + S(K), because ranks share the batch and meet once for each;
    - ``sync_every=H``: (c0 + c1 b)/K + S(K)/(K H), because K batches go on at the same time;
    - ``sync_every="epoch"``: (c0 + c1 b)/K + S(K)/n, with n batches in an epoch.

    Each worker is taken to have the cores that it has now, however many workers there are. What busy
    cores share (caches, the way to memory, the clock) makes each of them slower. A fit of K > 1
    workers has that in its times; one of a single worker has not, and then `contention` stands for it:
    with K > 1, computing takes so many times as long, and c0 and c1 are those of a worker alone.

    Parameters
    ----------
    c0, c1 : float
        Seconds that a step computes: in any case, and for each row.
    s0, s1 : float
        Seconds that a meeting takes: in any case, and for each rank.
    batch_size : float
        b.
    sync_every : {'batch', 'epoch'} or int
        When ranks meet, as of `DistributedCNNClassifier`.
    batches_per_epoch : float, optional
        n, for ``sync_every="epoch"``.
    covariance : ndarray of shape (4, 4), optional
        Of c0, c1, s0, s1; NaN where the measurements do not tell.
    notes : tuple of str
        What the measurements could not tell, and what was assumed in its place.
    contention : float, default=1.0
        How many times as long a step computes beside busy neighbours as alone. 1 for workers on hosts
        of their own, and for coefficients that were fitted to workers that had such neighbours.

    Raises
    ------
    ValueError
        If a value has no meaning, such as negative seconds.

    Examples
    --------
    >>> model = SpeedupModel(c0=0.002, c1=0.0005, s0=0.0005, s1=0.00025, batch_size=32)
    >>> round(model.predict(2), 2), round(model.efficiency(2), 2), model.best_workers()
    (1.64, 0.82, 8)
    >>> round(model.with_contention(1.2).predict(2), 2)
    1.38
    """

    c0: float
    c1: float
    s0: float
    s1: float
    batch_size: float
    sync_every: str | int = "batch"
    batches_per_epoch: float = float("nan")
    covariance: NDArray[np.float64] = field(
        default_factory=lambda: np.full((4, 4), np.nan), repr=False, compare=False
    )
    notes: tuple[str, ...] = ()
    contention: float = 1.0

    def __post_init__(self) -> None:
        _check_model(self)

    @classmethod
    def fit(
        cls,
        n_workers: ArrayLike,
        batch_size: ArrayLike,
        compute_seconds: ArrayLike,
        sync_seconds: ArrayLike,
        sync_every: str | int = "batch",
        batches_per_epoch: float = float("nan"),
    ) -> SpeedupModel:
        """Fit the four coefficients by least squares.

        None becomes negative: one that would is 0, and the others are fitted without it.

        Parameters
        ----------
        n_workers : array of shape (n,)
            K of each measurement.
        batch_size : array of shape (n,) or int
            b of each measurement. The first is the one that the model predicts for.
        compute_seconds : array of shape (n,)
            What a step of one rank computed.
        sync_seconds : array of shape (n,)
            What a meeting took, waiting and moving data together. NaN where it was not measured;
            with K = 1 it does not count.
        sync_every : {'batch', 'epoch'} or int
        batches_per_epoch : float, optional
            Needed for ``sync_every="epoch"``.

        Returns
        -------
        SpeedupModel

        Raises
        ------
        ValueError
            If no compute time was measured, or a value is not a positive number.
        """
        K, b, compute, sync = _arrays(n_workers, batch_size, compute_seconds, sync_seconds)
        _check(K, b, compute, sync)
        rows = b / K if sync_every == "batch" else b
        computing, met = np.isfinite(compute), np.isfinite(sync) & (K > 1)
        c, c_covariance, c_notes = _fit_compute(rows[computing], compute[computing])
        s, s_covariance, s_notes = _fit_sync(K[met], sync[met])
        covariance = np.full((4, 4), np.nan)
        covariance[:2, :2], covariance[2:, 2:] = c_covariance, s_covariance
        covariance[:2, 2:] = covariance[2:, :2] = 0.0  # two fits, to different measurements
        notes = (*c_notes, *s_notes)
        (c0, c1), (s0, s1) = c.tolist(), s.tolist()
        return cls(c0, c1, s0, s1, float(b[0]), sync_every, batches_per_epoch, covariance, notes)

    @classmethod
    def from_report(cls, *reports: Any) -> SpeedupModel:
        """Fit the coefficients to what one fit measured, or several of the same net.

        One fit has one number of ranks, and its steps have about the same number of rows. It then says
        nothing of c0 and s1: they are 0, as in C/K + S, and `notes` says so. Fits with other numbers
        of workers or batch sizes tell them. A fit's first epoch warms up, and is left out where there
        are more.

        Parameters
        ----------
        *reports : FitReport
            All with the same ``sync_every``. The first has the batch size that is predicted for.

        Returns
        -------
        SpeedupModel

        Raises
        ------
        ValueError
            If there is no report, one has no epoch, or they differ in ``sync_every``.
        """
        if not reports:
            raise ValueError("there is no report to fit to: pass at least one.")
        modes = {report.sync_every for report in reports}
        if len(modes) != 1:
            raise ValueError(f"reports must have one sync_every in common, got {sorted(map(str, modes))}.")
        measured = [row for report in reports for row in _epochs(report)]
        first = reports[0]
        n_epochs = len({entry.epoch for entry in first.ranks})
        K, b, compute, sync = np.transpose(measured)
        model = cls.fit(K, b, compute, sync, modes.pop(), first.n_batches / n_epochs)
        return replace(model, batch_size=first.batch_size)

    def with_sync(self, n_workers: ArrayLike, sync_seconds: ArrayLike) -> SpeedupModel:
        """The same computing, with S(K) fitted to other measurements, such as a benchmark of rounds.

        Parameters
        ----------
        n_workers : array of shape (n,)
            K of each measurement, at least 2.
        sync_seconds : array of shape (n,)
            What a meeting took, waiting and moving data together.

        Returns
        -------
        SpeedupModel

        Raises
        ------
        ValueError
            If there is not one time for each K, or a K below 2.
        """
        if np.shape(n_workers) != np.shape(sync_seconds) or np.any(np.less(n_workers, 2)):
            raise ValueError(
                "n_workers must be numbers >= 2 with one of sync_seconds each, got"
                f" {n_workers!r} and {sync_seconds!r}."
            )
        K, sync = _arrays(n_workers, sync_seconds)
        _check_seconds("sync_seconds", sync)
        (s0, s1), s_covariance, s_notes = _fit_sync(K, sync)
        covariance = self.covariance.copy()
        covariance[2:, 2:] = s_covariance
        covariance[:2, 2:] = covariance[2:, :2] = 0.0
        notes = (*(note for note in self.notes if not note.startswith("S is")), *s_notes)
        return replace(self, s0=float(s0), s1=float(s1), covariance=covariance, notes=notes)

    def with_contention(self, contention: float) -> SpeedupModel:
        """The same worker, among others on its host.

        Parameters
        ----------
        contention : float
            How many times as long a step computes beside busy neighbours as alone. Measure it with
            as many ranks on the host as are to train there.

        Returns
        -------
        SpeedupModel

        Raises
        ------
        ValueError
            If it is not a number > 0.
        """
        return replace(self, contention=contention)

    def compute_seconds(self, n_workers: int) -> float:
        """Seconds of computing for a batch on K workers.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        float
        """
        slower = self.contention if n_workers > 1 else 1.0
        if self.sync_every == "batch":
            return slower * (self.c0 + self.c1 * self.batch_size / n_workers)
        return slower * (self.c0 + self.c1 * self.batch_size) / n_workers

    def sync_seconds(self, n_workers: int) -> float:
        """Seconds of waiting and moving data for a batch on K workers.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        float
            0 for K = 1.
        """
        if n_workers == 1:
            return 0.0
        return (self.s0 + self.s1 * n_workers) * self._meetings_per_batch(n_workers)

    def seconds_per_batch(self, n_workers: int) -> float:
        """Seconds that a batch takes on K workers, computing and meeting together.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        float
        """
        return self.compute_seconds(n_workers) + self.sync_seconds(n_workers)

    def predict(self, n_workers: int) -> float:
        """The speedup of K workers over one.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If K is not an integer >= 1.
        """
        _check_n_workers(n_workers)
        return self.seconds_per_batch(1) / self.seconds_per_batch(n_workers)

    def efficiency(self, n_workers: int) -> float:
        """The speedup of K workers divided by K.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If K is not an integer >= 1.
        """
        return self.predict(n_workers) / n_workers

    def best_workers(self, most: int = 256) -> int:
        """The smallest number of workers with the largest speedup.

        Parameters
        ----------
        most : int
            The largest number to look at. In batch mode a rank needs two rows, so no more than half
            the batch size is looked at.

        Returns
        -------
        int
            ``most`` itself if the speedup grows up to there.

        Raises
        ------
        ValueError
            If ``most`` is not an integer >= 1.
        """
        _check_n_workers(most, "most")
        if self.sync_every == "batch":
            most = min(most, max(1, int(self.batch_size) // 2))
        return 1 + int(np.argmax([self.predict(K) for K in range(1, most + 1)]))

    @property
    def standard_errors(self) -> dict[str, float]:
        """Of c0, c1, s0 and s1, in seconds; NaN where the measurements do not tell."""
        return dict(zip(COEFFICIENTS, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    def interval(self, n_workers: int) -> tuple[float, float]:
        """The predicted speedup less and plus two standard errors, to first order.

        It covers the spread of the measurements, not that of `contention`, nor what the model leaves
        out. From few measurements it is too narrow for a confidence of 95 %.

        Parameters
        ----------
        n_workers : int
            K.

        Returns
        -------
        low, high : float
            NaN if the measurements were too few to tell.
        """
        value, slope = self.predict(n_workers), self._slope(n_workers)
        # A coefficient without influence may be unknown: NaN times 0 would be NaN.
        used = slope != 0
        variance = slope[used] @ self.covariance[np.ix_(used, used)] @ slope[used]
        margin = 2 * float(np.sqrt(variance))
        return value - margin, value + margin

    def __str__(self) -> str:
        errors = self.standard_errors
        values = [
            f"{name} = {1000 * getattr(self, name):.3g} ms{_plus_minus(1000 * errors[name])}"
            for name in COEFFICIENTS
        ]
        meeting = {"batch": "c0 + c1*b/K + S(K)", "epoch": "(c0 + c1*b)/K + S(K)/n"}
        formula = meeting.get(str(self.sync_every), f"(c0 + c1*b)/K + S(K)/({self.sync_every}K)")
        lines = [f"{formula} for a batch, b = {self.batch_size:g}, S(K) = s0 + s1*K", ", ".join(values)]
        if self.contention != 1:
            lines.append(f"With K > 1, c0 and c1 are {self.contention:.3g} times as large.")
        return "\n".join([*lines, *self.notes])

    def _meetings_per_batch(self, n_workers: int) -> float:
        if self.sync_every == "batch":
            return 1.0
        if self.sync_every == "epoch":
            return 1 / self.batches_per_epoch
        return 1 / (n_workers * int(self.sync_every))

    def _slope(self, n_workers: int) -> NDArray[np.float64]:
        """How the predicted speedup changes with each coefficient."""
        one, many = self.seconds_per_batch(1), self.seconds_per_batch(n_workers)
        meetings = self._meetings_per_batch(n_workers) if n_workers > 1 else 0.0
        b, K = self.batch_size, n_workers
        slower = self.contention if n_workers > 1 else 1.0
        share = 1.0 if self.sync_every == "batch" else 1 / K
        of_one = np.array([1, b, 0, 0])
        of_many = np.array([slower * share, slower * b / K, meetings, meetings * K])
        return of_one / many - one * of_many / many**2


def _fit_compute(rows: NDArray, seconds: NDArray) -> tuple[NDArray, NDArray, list[str]]:
    if rows.max() >= _LEVERAGE * rows.min():
        return (*_least_squares(np.column_stack([np.ones_like(rows), rows]), seconds), [])
    note = f"c0 is taken as 0: all steps had about {rows.mean():.3g} rows."
    return (*_only(1, _least_squares(rows[:, np.newaxis], seconds)), [note])


def _fit_sync(n_workers: NDArray, seconds: NDArray) -> tuple[NDArray, NDArray, list[str]]:
    if len(np.unique(n_workers)) > 1:
        return (*_least_squares(np.column_stack([np.ones_like(seconds), n_workers]), seconds), [])
    if not len(seconds):
        note = "S is taken as 0: no meeting was measured."
        return np.zeros(2), np.full((2, 2), np.nan), [note]
    note = f"S is taken as constant: it was measured with {n_workers[0]:g} workers only."
    return (*_only(0, _least_squares(np.ones((len(seconds), 1)), seconds)), [note])


def _only(place: int, fitted: tuple[NDArray, NDArray]) -> tuple[NDArray, NDArray]:
    """Two coefficients, of which one was fitted and the other is 0."""
    coefficients, covariance = np.zeros(2), np.full((2, 2), np.nan)
    coefficients[place], covariance[place, place] = fitted[0][0], fitted[1][0, 0]
    covariance[0, 1] = covariance[1, 0] = 0.0
    return coefficients, covariance


def _least_squares(columns: NDArray, y: NDArray) -> tuple[NDArray, NDArray]:
    """Coefficients that are not negative, and their covariance; NaN without degrees of freedom."""
    n, p = columns.shape
    free = np.linalg.lstsq(columns, y)[0] >= 0
    coefficients = np.zeros(p)
    coefficients[free] = np.linalg.lstsq(columns[:, free], y)[0]
    spare = n - int(free.sum())
    variance = float(((y - columns @ coefficients) ** 2).sum()) / spare if spare else np.nan
    covariance = np.zeros((p, p))
    covariance[np.ix_(free, free)] = variance * np.linalg.inv(columns[:, free].T @ columns[:, free])
    return coefficients, covariance


def _epochs(report: Any) -> list[tuple[float, float, float, float]]:
    """K, b, seconds of a step and seconds of a meeting, for each epoch of a fit."""
    epochs = sorted({entry.epoch for entry in report.ranks})
    if not epochs:
        raise ValueError("the report has no epoch: nothing was measured.")
    return [_epoch(report, epoch) for epoch in epochs[1:] or epochs]


def _epoch(report: Any, epoch: int) -> tuple[float, float, float, float]:
    entries = [entry for entry in report.ranks if entry.epoch == epoch]
    n_workers = len(entries)  # of this epoch: not every epoch need have had all
    steps = sum(entry.steps for entry in entries)
    rows = sum(entry.rows for entry in entries) / steps
    batch_size = rows * n_workers if report.sync_every == "batch" else rows
    compute = sum(entry.compute_seconds for entry in entries) / steps
    idle = sum(entry.wait_seconds + entry.sync_seconds for entry in entries)
    meetings = sum(n_meetings(report.sync_every, entry.steps) for entry in entries)
    return n_workers, batch_size, compute, idle / meetings


def n_meetings(sync_every: str | int, steps: int) -> int:
    """How often a rank meets the others in an epoch of so many steps."""
    if sync_every == "batch":
        return steps
    return 1 if sync_every == "epoch" else -(-steps // int(sync_every))


def _arrays(*values: ArrayLike) -> tuple[NDArray, ...]:
    """One-dimensional, of the same length."""
    return tuple(np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, float)) for value in values)))


def _check(K: NDArray, b: NDArray, compute: NDArray, sync: NDArray) -> None:
    for name, values in (("n_workers", K), ("batch_size", b)):
        if not (np.isfinite(values) & (values >= 1)).all():
            raise ValueError(f"{name} must be numbers >= 1, got {values}.")
    _check_seconds("compute_seconds", compute)
    _check_seconds("sync_seconds", sync)
    if not np.isfinite(compute).any():
        raise ValueError("compute_seconds must have at least one measured value.")


def _check_model(model: SpeedupModel) -> None:
    for name in COEFFICIENTS:
        value = getattr(model, name)
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be seconds >= 0, got {value!r}.")
    if not (np.isfinite(model.contention) and model.contention > 0):
        raise ValueError(f"contention must be a number > 0, got {model.contention!r}.")
    if model.c0 + model.c1 == 0:
        raise ValueError("c0 and c1 must not both be 0: a step takes time.")
    if model.sync_every not in ("batch", "epoch"):
        if isinstance(model.sync_every, str):
            raise ValueError(
                f"sync_every must be 'batch', 'epoch' or an integer >= 1, got {model.sync_every!r}."
            )
        _check_n_workers(model.sync_every, "sync_every")
    if model.sync_every == "epoch" and not model.batches_per_epoch > 0:
        raise ValueError(
            f"batches_per_epoch must be a number > 0 for 'epoch', got {model.batches_per_epoch!r}."
        )


def _check_seconds(name: str, values: NDArray) -> None:
    if (values < 0).any() or np.isinf(values).any():
        raise ValueError(f"{name} must be seconds >= 0, got {values}.")


def _check_n_workers(value: Any, name: str = "n_workers") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


def _plus_minus(error: float) -> str:
    return "" if np.isnan(error) else f" ± {error:.2g}"
