import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, LRScheduler
from torch import nn

from daskps import _state
from daskps._answers import Records
from daskps._callbacks import EpochReplay, Snapshot, forget_epoch, step_without_gradients
from daskps._partitions import Batching, Cut, deal_validation, local_steps, plan_batches, plan_local
from daskps._spec import Order, Ticket
from daskps.exceptions import DaskpsError

N_ROWS, N_VALID = 20, 6


class Source:
    """Rows that hold their own number."""

    dataset_train = "train"

    def __init__(self, dataset_valid="valid"):
        self.dataset_valid = dataset_valid

    def batch(self, rows, training):
        start = 0 if training else 100
        return torch.as_tensor(rows + start), torch.as_tensor(rows % 3)


class Journal(Callback):
    """Writes down what it is told, and with which net."""

    def __init__(self):
        self.entries = []

    def on_batch_begin(self, net, batch=None, training=None, **kwargs):
        self.entries.append(("begin", training, batch[0].tolist()))

    def on_batch_end(self, net, batch=None, training=None, loss=None, y_pred=None, **kwargs):
        self.entries.append(("end", training, batch[0].tolist(), loss.item(), y_pred))


def net_for(*callbacks, **options):
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        nn.Linear,
        module__in_features=2,
        module__out_features=3,
        callbacks=[(f"mine{n}", callback) for n, callback in enumerate(callbacks)],
        **{"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "verbose": 0, **options},
    ).initialize()
    net.history.new_epoch()
    return net


def journal_of(net):
    return dict(net.callbacks_)["mine0"].entries


def cut_of(world_size=2, local=False, batch_size=8):
    plan = (plan_local if local else plan_batches)(N_ROWS, Batching(batch_size), world_size, 0)
    return Cut(plan, deal_validation(N_VALID, Batching(4), world_size))


def order_of(epoch=0, shuffle=False, predictions=False):
    fields = {"first": epoch == 0} if "first" in Order.__dataclass_fields__ else {}
    return Order(
        ticket=Ticket("run", 0, 0, 2), epoch=epoch, seed=5, shuffle=shuffle, settings=b"",
        predictions=predictions, **fields,
    )  # fmt: skip


def report(rank, losses, weights, epoch=0):
    return {"run_id": "run", "epoch": epoch, "rank": rank, "losses": losses, "weights": weights}


def result(losses, weights, validation=(), records=None, predictions=None):
    return SimpleNamespace(
        losses=np.array(losses, float),
        weights=np.array(weights, float),
        validation=_state.to_bytes(list(validation)),
        records=records,
        predictions=_state.to_bytes(predictions),
    )


def replay_for(net, cut=None, order=None, source=None):
    return EpochReplay(net, source or Source(), cut or cut_of(), order or order_of())


SERIAL = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
TWO_RANKS = [result([3.0, 2.0, 1.0], [4, 4, 2]), result([3.0, 2.0, 1.0], [4, 4, 2])]


class TestTrainingBatches:
    def test_are_replayed_in_serial_order_with_the_loss_of_all_ranks(self):
        net = net_for(Journal())
        replay_for(net).finish(TWO_RANKS)
        entries = journal_of(net)
        assert [entry[:3] for entry in entries if entry[0] == "begin"] == [
            ("begin", True, rows) for rows in SERIAL
        ]
        assert [entry[2:4] for entry in entries if entry[0] == "end"] == [
            (rows, loss) for rows, loss in zip(SERIAL, [3.0, 2.0, 1.0], strict=True)
        ]
        assert [entry[0] for entry in entries] == ["begin", "end"] * 3

    def test_are_in_the_history_as_skorch_writes_them(self):
        net = net_for()
        replay_for(net).finish(TWO_RANKS)
        assert net.history[-1, "batches", :, "train_loss"] == [3.0, 2.0, 1.0]
        assert net.history[-1, "batches", :, "train_batch_size"] == [8, 8, 4]
        assert net.history[-1, "train_batch_count"] == 3

    def test_values_in_the_history_are_plain_numbers(self):
        net = net_for()
        replay_for(net).finish(TWO_RANKS)
        for row in net.history[-1, "batches"]:
            assert {type(value) for value in row.values()} == {float, int}

    def test_are_replayed_as_soon_as_all_ranks_have_made_them(self):
        net = net_for(Journal())
        replay = replay_for(net)
        replay.advance(report(0, [3.0, 2.0], [4, 4]))
        assert journal_of(net) == []
        replay.advance(report(1, [3.0], [4]))
        assert [entry[2] for entry in journal_of(net)[::2]] == SERIAL[:1]
        replay.advance(report(1, [2.0, 1.0], [4, 2]))
        assert [entry[2] for entry in journal_of(net)[::2]] == SERIAL[:2]
        replay.finish(TWO_RANKS)
        assert [entry[2] for entry in journal_of(net)[::2]] == SERIAL

    def test_report_of_another_epoch_is_left_out(self):
        net = net_for(Journal())
        replay = replay_for(net, order=order_of(epoch=1))
        for rank in range(2):
            replay.advance(report(rank, [3.0], [4], epoch=0))
        assert journal_of(net) == []

    def test_losses_of_unequal_pieces_are_weighted(self):
        net = net_for()
        results = [result([1.0, 4.0, 2.0], [6, 3, 4]), result([5.0, 1.0, 9.0], [2, 1, 0])]
        replay_for(net).finish(results)
        expected = [(6 * 1 + 2 * 5) / 8, (3 * 4 + 1) / 4, 2.0]
        assert net.history[-1, "batches", :, "train_loss"] == pytest.approx(expected)

    def test_loss_of_a_rank_without_weight_may_be_nan(self):
        net = net_for()
        nan = float("nan")
        replay_for(net).finish([result([1.0, nan, nan], [4, 0, 0]), result([nan, 2.0, nan], [0, 4, 0])])
        losses = net.history[-1, "batches", :, "train_loss"]
        assert losses[:2] == [1.0, 2.0]
        assert np.isnan(losses[2])

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_of_a_shuffled_epoch_are_the_rows_that_the_ranks_used(self, world_size):
        net = net_for(Journal())
        replay = replay_for(net, cut_of(world_size), order_of(epoch=3, shuffle=True))
        replay.finish([result([1.0] * 3, [2] * 3)] * world_size)
        rows = [entry[2] for entry in journal_of(net)[::2]]
        assert [len(batch) for batch in rows] == [8, 8, 4]
        assert sorted(np.concatenate(rows)) == list(range(N_ROWS))
        assert rows != SERIAL

    def test_of_local_steps_are_the_ranks_steps_together(self):
        net = net_for(Journal())
        cut = cut_of(2, local=True, batch_size=4)
        n_steps = local_steps([10, 10], 4).shape[1]
        replay_for(net, cut).finish([result([1.0] * n_steps, [4] * n_steps)] * 2)
        sizes = net.history[-1, "batches", :, "train_batch_size"]
        assert sizes == [8, 8, 4]
        rows = np.concatenate([entry[2] for entry in journal_of(net)[::2]])
        assert sorted(rows) == list(range(N_ROWS))


class TestPredictions:
    def test_of_all_ranks_are_laid_end_to_end(self):
        net = net_for(Journal())
        first = [torch.full((n, 3), 1.0) for n in (4, 4, 2)]
        second = [torch.full((n, 3), 2.0) for n in (4, 4, 2)]
        results = [
            result([1.0] * 3, [4, 4, 2], predictions=first),
            result([1.0] * 3, [4, 4, 2], predictions=second),
        ]
        replay_for(net, order=order_of(predictions=True)).finish(results)
        y_pred = [entry[4] for entry in journal_of(net) if entry[0] == "end"]
        assert [len(batch) for batch in y_pred] == [8, 8, 4]
        assert y_pred[0][:, 0].tolist() == [1.0] * 4 + [2.0] * 4

    def test_of_a_rank_without_rows_are_left_out(self):
        net = net_for(Journal())
        held = [torch.ones(n, 3) for n in (8, 8, 4)]
        results = [
            result([1.0] * 3, [8, 8, 4], predictions=held),
            result([1.0] * 3, [0, 0, 0], predictions=[None] * 3),
        ]
        replay_for(net, order=order_of(predictions=True)).finish(results)
        assert [len(e[4]) for e in journal_of(net) if e[0] == "end"] == [8, 8, 4]

    def test_hold_back_the_replay_until_they_are_there(self):
        net = net_for(Journal())
        replay = replay_for(net, order=order_of(predictions=True))
        for rank in range(2):
            replay.advance(report(rank, [1.0], [4]))
        assert journal_of(net) == []

    def test_are_none_if_nobody_wants_them(self):
        net = net_for(Journal())
        replay_for(net).finish(TWO_RANKS)
        assert {entry[4] for entry in journal_of(net) if entry[0] == "end"} == {None}


class TestRecords:
    def test_of_callbacks_on_rank_0_are_in_the_history(self):
        net = net_for()
        records = Records([{"event_lr": 0.5}, {"event_lr": 0.25}, {}], {"norm": 3.0}, b"")
        results = [result([3.0, 2.0, 1.0], [4, 4, 2], records=records), TWO_RANKS[1]]
        replay_for(net).finish(results)
        rows = net.history[-1, "batches"]
        assert [row.get("event_lr") for row in rows] == [0.5, 0.25, None]
        assert net.history[-1, "norm"] == 3.0
        assert [row["train_loss"] for row in rows] == [3.0, 2.0, 1.0]


class TestValidation:
    def steps(self):
        predictions = [torch.full((4, 3), 0.5), torch.full((2, 3), 0.25)]
        return [
            [{"loss": torch.tensor(2.0), "y_pred": predictions[0]}],
            [{"loss": torch.tensor(4.0), "y_pred": predictions[1]}],
        ]

    def test_batches_are_replayed_in_serial_order_with_what_the_ranks_computed(self):
        net = net_for(Journal())
        replay = replay_for(net)
        results = [result([1.0] * 3, [4, 4, 2], validation=steps) for steps in self.steps()]
        replay.validate(results)
        ends = [entry for entry in journal_of(net) if entry[0] == "end"]
        assert [entry[1:4] for entry in ends] == [
            (False, [100, 101, 102, 103], 2.0), (False, [104, 105], 4.0),
        ]  # fmt: skip
        assert ends[1][4].tolist() == [[0.25] * 3] * 2
        assert net.history[-1, "batches", :, "valid_loss"] == [2.0, 4.0]
        assert net.history[-1, "batches", :, "valid_batch_size"] == [4, 2]
        assert net.history[-1, "valid_batch_count"] == 2

    def test_without_validation_rows_leaves_no_trace(self):
        net = net_for()
        cut = Cut(cut_of().training, [])
        replay = replay_for(net, cut, source=Source(dataset_valid=None))
        replay.validate(TWO_RANKS)
        assert "valid_batch_count" not in net.history[-1]


class TestChangesInAReplay:
    def changing(self, change):
        class Changing(Callback):
            def on_batch_end(self, net, **kwargs):
                change(net)

        return net_for(Changing())

    @pytest.mark.parametrize("change", [
        lambda net: net.module_.weight.data.clamp_(-0.1, 0.1),
        lambda net: net.module_.bias.data.fill_(float("nan")),
        lambda net: net.optimizer_.state[net.module_.bias].update(momentum_buffer=torch.ones(3)),
    ], ids=["weights", "nan", "optimizer"])  # fmt: skip
    def test_are_an_error_that_says_what_to_do(self, change):
        net = self.changing(change)
        with pytest.raises(DaskpsError, match=r"wrap the callback in daskps\.on_ranks"):
            replay_for(net).finish(TWO_RANKS)

    @pytest.mark.parametrize("change", [
        lambda net: net.history.record("seen", 1),
        lambda net: net.module_.weight.sum().item(),
        lambda net: setattr(net, "count_", 1),
    ], ids=["history", "reading", "attribute"])  # fmt: skip
    def test_of_other_things_are_none(self, change):
        replay_for(self.changing(change)).finish(TWO_RANKS)

    def test_error_of_a_callback_reaches_the_caller(self):
        def interrupt(net):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            replay_for(self.changing(interrupt)).finish(TWO_RANKS)


class TestSnapshot:
    def test_holds_until_a_value_changes(self):
        net = net_for()
        snapshot = Snapshot(net)
        assert snapshot.holds(net)
        with torch.no_grad():
            net.module_.weight[0, 0] += 1e-6
        assert not snapshot.holds(net)

    def test_holds_if_a_value_is_nan(self):
        net = net_for()
        with torch.no_grad():
            net.module_.weight.fill_(float("nan"))
        assert Snapshot(net).holds(net)

    def test_sees_the_sign_of_zero(self):
        net = net_for()
        with torch.no_grad():
            net.module_.bias.zero_()
        snapshot = Snapshot(net)
        with torch.no_grad():
            net.module_.bias.mul_(-1)
        assert not snapshot.holds(net)

    def test_sees_optimizer_state(self):
        net = net_for()
        net.optimizer_.state[net.module_.bias]["momentum_buffer"] = torch.zeros(3)
        snapshot = Snapshot(net)
        net.optimizer_.state[net.module_.bias]["momentum_buffer"][0] = 1.0
        assert not snapshot.holds(net)

    def test_sees_optimizer_state_that_came_or_went(self):
        net = net_for()
        snapshot = Snapshot(net)
        net.optimizer_.state[net.module_.bias]["momentum_buffer"] = torch.zeros(3)
        assert not snapshot.holds(net)

    def test_is_a_copy(self):
        net = net_for()
        before = net.module_.weight.detach().clone()
        snapshot = Snapshot(net)
        with torch.no_grad():
            net.module_.weight.add_(1.0)
            net.module_.weight.copy_(before)
        assert snapshot.holds(net)


class TestStepWithoutGradients:
    @pytest.mark.parametrize("optimizer", [
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
        torch.optim.RMSprop, torch.optim.LBFGS,
    ])  # fmt: skip
    def test_changes_no_parameter(self, optimizer):
        options = {"optimizer": optimizer}
        if optimizer is torch.optim.SGD:
            options["optimizer__momentum"] = 0.9
        torch.manual_seed(0)
        net = NeuralNetClassifier(
            nn.Linear, module__in_features=2, module__out_features=3, **options
        ).initialize()
        net.train_step((torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
        before = [p.detach().clone() for p in net.module_.parameters()]
        step_without_gradients(net)
        assert all(torch.equal(a, b) for a, b in zip(before, net.module_.parameters(), strict=True))

    def test_keeps_a_schedule_from_warning(self):
        net = net_for(LRScheduler("StepLR", step_size=1, gamma=0.5), lr=0.5)
        schedule = dict(net.callbacks_)["mine0"]
        net.history.clear()
        schedule.on_train_begin(net)
        net.history.new_epoch()
        step_without_gradients(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.on_epoch_end(net)
        assert net.optimizer_.param_groups[0]["lr"] == 0.25


class TestForgetEpoch:
    def test_that_did_not_end(self):
        net = net_for()
        forget_epoch(net)
        assert len(net.history) == 0

    def test_that_ended_is_kept(self):
        net = net_for()
        replay_for(net).finish(TWO_RANKS)
        forget_epoch(net)
        assert len(net.history) == 1

    def test_of_an_empty_history_is_nothing(self):
        net = net_for()
        net.history.clear()
        forget_epoch(net)
        assert len(net.history) == 0
