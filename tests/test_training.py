from types import SimpleNamespace

import pytest
from nets import CNN3
from reference import make_net

from daskps._training import Job, Training, _entry
from daskps.exceptions import ClusterTooSmallError, WorkerLostError


@pytest.mark.parametrize(
    ("setup", "waited", "expected"), [(5.0, 0.25, 0.25), (2.0, 3.5, 0.5), (2.0, 2.75, 0.0)]
)
def test_waiting_for_ranks_that_are_not_set_up_yet_is_no_waiting_of_the_epoch(setup, waited, expected):
    traffic = SimpleNamespace(rounds=4, wait_seconds=waited, sync_seconds=0.125, bytes=8)
    result = SimpleNamespace(
        traffic=traffic,
        setup_seconds=setup,
        rows=32,
        losses=[1.0] * 4,
        compute_seconds=1.5,
        transport="comm",
    )
    entry = _entry(0, 1, result, slowest_setup=5.0)
    assert entry.wait_seconds == expected
    assert (entry.rank, entry.steps, entry.compute_seconds, entry.sync_seconds) == (1, 4, 1.5, 0.125)


class Poisoned:
    """Rows that kill every worker to which they are brought."""

    def cut(self, *args):
        raise WorkerLostError("worker a left", "tcp://a", "run", round=3)


def training_with(allowed_failures, renew):
    run = SimpleNamespace(
        watch=SimpleNamespace(allowed_failures=allowed_failures), renew=renew, world_size=1, shards=[]
    )
    net = make_net(CNN3, module__n=3).initialize()
    return Training(Job(net, Poisoned(), every=0, seed=0), run, report=None)


def test_an_epoch_that_has_lost_too_many_waits_for_no_other_worker():
    asked = []
    with pytest.raises(WorkerLostError, match=r"worker a left, in epoch 1") as caught:
        training_with(0, lambda join: asked.append(join)).place()
    assert "loss number 1 " in caught.value.__notes__[0]
    assert asked == []


def test_if_no_worker_is_left_the_error_says_which_was_lost():
    def renew(join):
        raise ClusterTooSmallError("none came")

    with pytest.raises(ClusterTooSmallError) as caught:
        training_with(3, renew).place()
    assert caught.value.__cause__.worker == "tcp://a"
