"""The loop over the steps of an epoch, with a stand-in for Dask's worker."""

import numpy as np
import pytest
import torch
from ranks import RULES, replica_of, side_by_side
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from daskps import _state
from daskps._epoch import Epoch
from daskps._partitions import Batching, Shard, pieces, plan_batches, plan_local
from daskps._replica import Opening
from daskps._spec import Order, Ticket
from daskps._transport import NoChannel
from daskps._worker_plugin import Seat, make_sync
from daskps.exceptions import DaskpsError, RunAbortedError

N_ROWS = 22


class Worker:
    """Takes in what a rank reports."""

    def __init__(self):
        self.events = []

    def log_event(self, topic, message):
        self.events.append(message)


class Journal(Callback):
    def initialize(self):
        self.entries_ = []
        return self

    def on_train_begin(self, net, **kwargs):
        self.entries_.append("train begin")

    def on_epoch_begin(self, net, **kwargs):
        self.entries_.append("epoch begin")

    def on_batch_begin(self, net, training=None, **kwargs):
        self.entries_.append(f"batch begin {training}")

    def on_grad_computed(self, net, named_parameters, **kwargs):
        self.entries_.append("gradient")

    def on_batch_end(self, net, training=None, **kwargs):
        self.entries_.append(f"batch end {training}")
        if training:
            net.history.record_batch("seen", len(self.entries_))

    def on_epoch_end(self, net, **kwargs):
        self.entries_.append("epoch end")
        net.history.record("steps", 2)


class Silent(NeuralNetClassifier):
    """Steps without saying that its gradients are there."""

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        self.optimizer_.step()
        return step


class Failing(nn.Linear):
    def forward(self, X):
        if (X == 99).any():
            raise ValueError("boom")
        return super().forward(X)


def net_for(kind=NeuralNetClassifier, module=nn.Linear, **options):
    torch.manual_seed(0)
    defaults = {
        "module__in_features": 4,
        "module__out_features": 3,
        "module__dtype": torch.float64,
        "criterion": nn.CrossEntropyLoss,
        "optimizer": torch.optim.SGD,
        "optimizer__momentum": 0.9,
        "lr": 0.1,
        "batch_size": 10,
        "train_split": None,
    }
    return kind(module, **{**defaults, **options}).initialize()


def rows(n_rows=N_ROWS):
    return np.random.RandomState(0).randn(n_rows, 4), np.arange(n_rows) % 3


def shard_of(plan, rank, n_valid=0, valid_sizes=()):
    X, y = rows()
    return Shard(
        X[plan.rows[rank]], y[plan.rows[rank]], plan.sizes[rank],
        X[:n_valid] if n_valid else None, y[:n_valid] if n_valid else None,
        np.array(valid_sizes, int),
    )  # fmt: skip


def order_of(rank, world_size, **options):
    defaults = {
        "epoch": 0, "first": True, "seed": 1, "shuffle": False, "settings": b"", "predictions": False,
    }  # fmt: skip
    known = Order.__dataclass_fields__
    fields = {key: value for key, value in {**defaults, **options}.items() if key in known}
    return Order(ticket=Ticket("run", 0, rank, world_size), **fields)


def opening_of(every):
    return Opening(b"", b"", every, b"", b"", RULES)


def epoch_of(net, shard, channel, order, every=0, interval=0.25):
    replica = replica_of(net)
    sync = make_sync(replica, channel, order.ticket, opening_of(every))
    replica.sync_ = sync
    rules = RULES._replace(report_interval=interval)
    seat = Seat(order.ticket, replica, sync, channel, order.epoch, rules)
    return Epoch(seat, order, shard, Worker())


def alone(net, shard=None, interval=0.25, **options):
    """An epoch of a world of one."""
    shard = shard or shard_of(plan_batches(N_ROWS, Batching(10), 1, 0), 0)
    return epoch_of(net, shard, NoChannel(), order_of(0, 1, **options), interval=interval)


def together(net, plan, every=0, **options):
    """The results of all ranks' epochs."""
    world_size = len(plan.rows)

    def rank_does(rank, channel):
        order = order_of(rank, world_size, **options)
        return epoch_of(net, shard_of(plan, rank), channel, order, every).run(0.5)

    return side_by_side(world_size, rank_does)


def state_of(net, result):
    _state.load(net, result.state)
    return net.module_.weight.detach().clone()


def serial(net):
    X, y = rows()
    loader = net.get_iterator(net.get_dataset(X, y), training=True)
    return [net.train_step(batch)["loss"].item() for batch in loader]


class TestEpoch:
    def test_of_one_rank_is_that_of_plain_skorch(self):
        net = net_for()
        result = alone(net).run(0.5)
        plain = net_for()
        assert result.losses.tolist() == serial(plain)
        assert torch.equal(state_of(net, result), plain.module_.weight)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_of_several_ranks_is_that_of_plain_skorch(self, world_size):
        net, plain = net_for(), net_for()
        plan = plan_batches(N_ROWS, Batching(10), world_size, 0)
        results = together(net, plan)
        losses = serial(plain)
        assert (state_of(net, results[0]) - plain.module_.weight).abs().max() <= 1e-12
        for rank, result in enumerate(results):
            assert result.losses.tolist() == pytest.approx(losses)
            assert result.weights.tolist() == plan.sizes[rank].tolist()
            assert result.rows == len(plan.rows[rank])
            assert result.uniform

    def test_of_local_steps_reports_each_ranks_own_losses(self):
        net = net_for()
        plan = plan_local(N_ROWS, Batching(4), 2, 0)
        results = together(net, plan, every=None)
        assert results[0].losses[0] != results[1].losses[0]
        assert [r.weights.tolist() for r in results] == plan.sizes.tolist()

    def test_only_rank_0_brings_the_state(self):
        results = together(net_for(), plan_batches(N_ROWS, Batching(10), 2, 0))
        assert [bool(result.state) for result in results] == [True, False]

    def test_measures_what_the_channel_did(self):
        result = alone(net_for()).run(0.5)
        assert result.setup_seconds == 0.5
        assert result.compute_seconds > 0
        assert (result.traffic.rounds, result.traffic.bytes, result.transport) == (0, 0, "none")

    def test_says_which_road_the_values_took(self):
        results = together(net_for(), plan_batches(N_ROWS, Batching(10), 2, 0))
        assert [result.transport for result in results] == ["comm", "shared-memory"]
        for result in results:
            assert result.traffic.rounds == 3
            assert result.traffic.bytes > 0

    def test_is_counted_by_the_seat(self):
        epoch = alone(net_for(), epoch=4)
        epoch.run(0.0)
        assert epoch.seat.epoch == 5

    def test_shuffled_epoch_repeats_itself_and_differs_from_the_next(self):
        losses = [alone(net_for(), shuffle=True, epoch=e).run(0).losses.tolist() for e in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]

    def test_validation_steps_come_back_in_order(self):
        net = net_for()
        plan = plan_batches(N_ROWS, Batching(10), 1, 0)
        shard = shard_of(plan, 0, n_valid=7, valid_sizes=[4, 3])
        result = alone(net, shard).run(0.0)
        steps = _state.from_bytes(result.validation)
        state_of(net, result)
        X, y = rows()
        for step, part in zip(steps, pieces(np.arange(7), [4, 3]), strict=True):
            expected = net.validation_step((torch.as_tensor(X[part]), torch.as_tensor(y[part])))
            assert torch.equal(step["y_pred"], expected["y_pred"])
            assert torch.equal(step["loss"], expected["loss"])

    def test_predictions_come_back_on_request(self):
        plan = plan_batches(N_ROWS, Batching(10), 2, 0)
        results = together(net_for(), plan, predictions=True)
        for result, sizes in zip(results, plan.sizes, strict=True):
            held = _state.from_bytes(result.predictions)
            assert [0 if part is None else len(part) for part in held] == sizes.tolist()
        assert not together(net_for(), plan)[0].predictions


class TestCallbacksOnRanks:
    def test_see_all_events_in_order_on_every_rank(self):
        net = net_for(callbacks=[("journal", Journal())])
        plan = plan_batches(N_ROWS, Batching(20), 2, 0)
        assert plan.sizes.tolist() == [[10, 2], [10, 0]]
        epochs = []

        def rank_does(rank, channel):
            epoch = epoch_of(net, shard_of(plan, rank), channel, order_of(rank, 2))
            epochs.append(epoch)
            return epoch.run(0.0)

        side_by_side(2, rank_does)
        step = ["batch begin True", "gradient", "batch end True"]
        for epoch in epochs:
            ((_, journal),) = epoch.net.callbacks_
            assert journal.entries_ == ["train begin", "epoch begin", *step, *step, "epoch end"]

    def test_of_rank_0_bring_their_records_home(self):
        net = net_for(callbacks=[("journal", Journal())])
        first, second = together(net, plan_batches(N_ROWS, Batching(20), 2, 0))
        assert [set(batch) for batch in first.records.batches] == [{"seen"}, {"seen"}]
        assert first.records.epoch == {"steps": 2}
        ((_, journal),) = _state.load_callbacks(net, first.records.callbacks)
        assert journal.entries_[-1] == "epoch end"
        assert second.records is None

    def test_that_are_none_leave_no_records(self):
        assert alone(net_for()).run(0.0).records is None


class TestFailure:
    def test_step_that_never_notifies_is_an_error_that_says_what_to_do(self):
        with pytest.raises(DaskpsError, match=r"Silent\.train_step .* 'on_grad_computed'"):
            alone(net_for(Silent)).run(0.0)

    def test_of_a_step_says_where_it_was(self):
        shard = shard_of(plan_batches(N_ROWS, Batching(10), 1, 0), 0)
        shard.X[15] = 99
        with pytest.raises(ValueError, match="boom") as caught:
            alone(net_for(module=Failing), shard, epoch=6).run(0.0)
        assert caught.value.__notes__ == ["Raised on rank 0 of 1, epoch 7, step 2 of 3."]

    def test_run_that_ended_elsewhere_stops_the_rank(self):
        epoch = alone(net_for())
        epoch.seat.left.set()
        with pytest.raises(RunAbortedError):
            epoch.run(0.0)
        assert np.isnan(epoch.losses).all()


class TestReports:
    def test_of_finished_steps_add_up_to_the_losses(self):
        epoch = alone(net_for(), interval=0.0, epoch=2)
        result = epoch.run(0.0)
        events = epoch.reporter.worker.events
        assert [event["rank"] for event in events] == [0, 0, 0]
        assert {event["epoch"] for event in events} == {2}
        assert [loss for event in events for loss in event["losses"]] == result.losses.tolist()
        assert [w for event in events for w in event["weights"]] == result.weights.tolist()

    def test_are_not_sent_more_often_than_the_setting_says(self):
        epoch = alone(net_for(), interval=3600.0)
        epoch.run(0.0)
        assert epoch.reporter.worker.events == []

    def test_are_plain_values(self):
        epoch = alone(net_for(), interval=0.0)
        epoch.run(0.0)
        for event in epoch.reporter.worker.events:
            assert {type(value) for value in event["losses"] + event["weights"]} == {float}
