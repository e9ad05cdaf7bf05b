from dataclasses import replace

import pytest
from reports import lost_one_of_three, report_of


def boundary(report, share):
    """The same fit with so much of its epochs' time on the client."""
    report.epoch_seconds = [report._stepping_seconds() / (1 - share)]
    return report


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            {"n_workers": 2, "compute": 9.0, "idle": 1.0},
            "Compute-bound: 90% of a rank's time is computing, so more workers pay.",
        ),
        (
            {"n_workers": 4, "compute": 4.5, "idle": 5.0},
            "Communication-bound beyond 3 workers: use sync_every='epoch' or a larger batch_size.",
        ),
        (
            {"n_workers": 2, "compute": 9.0, "idle": 4.0},
            "Communication-bound from about 5 workers on: use sync_every='epoch' or a larger batch_size.",
        ),
        (
            {"n_workers": 2, "compute": 1.0, "idle": 9.0},
            "Communication-bound: use sync_every='epoch' or a larger batch_size.",
        ),
        (
            {"n_workers": 2, "sync_every": "epoch", "compute": 1.0, "idle": 900.0},
            "Communication-bound: use fewer workers, or more rows in an epoch.",
        ),
        (
            {"n_workers": 2, "sync_every": 4, "compute": 1.0, "idle": 36.0},
            "Communication-bound: use sync_every='epoch' or a larger number than 4.",
        ),
        (
            {"n_workers": 1, "compute": 0.018},
            (
                "One worker has nobody to wait for. A batch takes 18 ms of computing: more workers pay if"
                " meeting the others takes far less."
            ),
        ),
    ],
)
def test_names_the_largest_loss_and_a_remedy(arguments, advice):
    assert report_of(**arguments).advice() == advice


def test_names_the_rank_that_the_others_wait_for():
    report = report_of(4, compute=4.0, idle=3.0)
    fast = [entry for entry in report.ranks if entry.rank != 2]
    slow = [
        type(entry)(**{**vars(entry), "compute_seconds": 2 * entry.compute_seconds})
        for entry in report.ranks
        if entry.rank == 2
    ]
    report.ranks = [*fast, *slow]
    assert report.advice().startswith(
        "Rank 2 computes 2.0 times as long as the others, and they wait for it"
    )


def test_who_was_in_more_epochs_than_a_lost_rank_is_not_called_slow():
    report = lost_one_of_three()
    report.ranks = [replace(entry, wait_seconds=entry.compute_seconds) for entry in report.ranks]
    assert report.advice().startswith("Communication-bound")


def test_speaks_of_the_client_where_epochs_end_and_begin_for_long():
    report = boundary(report_of(2, compute=9.0, idle=1.0), 0.4)
    assert report.advice().startswith("40% of the epochs' time passed on the client")
    assert report.advice().endswith("so more workers pay.")
    assert boundary(report, 0.1).advice().startswith("Compute-bound")
