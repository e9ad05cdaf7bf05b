import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import (
    BatchScoring,
    Callback,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    LRScheduler,
    PrintLog,
    ProgressBar,
)
from torch import nn

from daskps import _hooks, on_ranks

EVENTS = {
    "on_train_begin": {"X": "X", "y": "y"},
    "on_train_end": {"X": "X", "y": "y"},
    "on_epoch_begin": {"dataset_train": 1, "dataset_valid": 2},
    "on_epoch_end": {"dataset_train": 1, "dataset_valid": 2},
    "on_batch_begin": {"batch": 1, "training": True},
    "on_batch_end": {"batch": 1, "training": True, "loss": 3, "y_pred": 4},
    "on_grad_computed": {"named_parameters": [], "batch": 1, "training": True},
}


class Journal(Callback):
    """Writes down every event."""

    def initialize(self):
        self.entries_ = ["initialize"]
        return self


for _event in EVENTS:

    def _note(self, net, _event=_event, **kwargs):
        self.entries_.append((_event, net, kwargs))

    setattr(Journal, _event, _note)


class OwnGradient(Callback):
    def on_grad_computed(self, net, named_parameters, **kwargs):
        pass


class Watching(Callback):
    def on_batch_end(self, net, **kwargs):
        pass


def net_for(*callbacks):
    named = [(f"c{n}", callback) for n, callback in enumerate(callbacks)]
    net = NeuralNetClassifier(
        nn.Linear, module__in_features=2, module__out_features=3, callbacks=named, verbose=0
    )
    return net.initialize()


def own(callbacks):
    """Those of the test, without skorch's own."""
    return [name for name, _ in callbacks if name.startswith("c") and name[1:].isdigit()]


class TestOnRanks:
    @pytest.mark.parametrize("event", EVENTS)
    def test_passes_every_event_on(self, event):
        journal = Journal()
        wrapped = on_ranks(journal).initialize()
        getattr(wrapped, event)("net", **EVENTS[event])
        assert journal.entries_ == ["initialize", (event, "net", EVENTS[event])]

    def test_does_in_plain_skorch_what_the_callback_does(self):
        class Clamp(Callback):
            def on_batch_end(self, net, **kwargs):
                net.module_.weight.data.clamp_(-0.01, 0.01)

        net = net_for(on_ranks(Clamp())).set_params(train_split=None, max_epochs=1)
        net.fit(torch.ones(6, 2).numpy(), torch.tensor([0, 1, 2] * 2).numpy())
        assert net.module_.weight.abs().max() <= 0.011

    def test_parameters_of_the_callback_stay_within_reach(self):
        net = net_for(on_ranks(GradientNormClipping(1.0)))
        assert net.get_params()["callbacks__c0__callback__gradient_clip_value"] == 1.0


class TestSide:
    @pytest.mark.parametrize(("callback", "on_the_ranks"), [
        (on_ranks(Watching()), True),
        (GradientNormClipping(1.0), True),
        (OwnGradient(), True),
        (LRScheduler("StepLR", step_size=1, step_every="batch"), True),
        (LRScheduler("StepLR", step_size=1), False),
        (Watching(), False),
        (EpochScoring("accuracy"), False),
        (PrintLog(), False),
        (ProgressBar(), False),
        (Freezer("weight"), False),
    ], ids=lambda value: type(value).__name__)  # fmt: skip
    def test_of_a_callback(self, callback, on_the_ranks):
        net = net_for(callback)
        assert own(_hooks.rank_side(net)) == (["c0"] if on_the_ranks else [])
        with _hooks.client_side_only(net):
            assert own(net.callbacks_) == ([] if on_the_ranks else ["c0"])

    def test_order_of_callbacks_is_kept(self):
        net = net_for(Watching(), OwnGradient(), Watching(), OwnGradient())
        before = [name for name, _ in net.callbacks_]
        with _hooks.client_side_only(net):
            assert own(net.callbacks_) == ["c0", "c2"]
        assert [name for name, _ in net.callbacks_] == before

    def test_all_are_back_after_an_error(self):
        net = net_for(OwnGradient())
        with pytest.raises(KeyError), _hooks.client_side_only(net):
            raise KeyError
        assert own(net.callbacks_) == ["c0"]

    def test_those_that_come_back_take_their_places(self):
        net = net_for(Watching(), OwnGradient())
        came_back = OwnGradient()
        _hooks.replace(net, [("c1", came_back), ("stranger", OwnGradient())])
        held = dict(net.callbacks_)
        assert held["c1"] is came_back
        assert "stranger" not in held
        assert own(net.callbacks_) == ["c0", "c1"]


class TestPredictions:
    @pytest.mark.parametrize(("callback", "expected"), [
        (EpochScoring("accuracy", on_train=True), True),
        (BatchScoring("accuracy", on_train=True), True),
        (EpochScoring("accuracy", on_train=True, use_caching=False), False),
        (EpochScoring("accuracy"), False),
        (Watching(), False),
    ])  # fmt: skip
    def test_are_wanted_by_who_scores_training_batches(self, callback, expected):
        assert _hooks.wants_predictions(net_for(callback)) is expected


class TestCheck:
    @pytest.mark.parametrize("every", [0, 3, None])
    def test_callbacks_that_work_pass(self, every):
        by_epoch = LRScheduler("ReduceLROnPlateau", monitor="train_loss")
        by_batch = LRScheduler("StepLR", step_size=3, step_every="batch")
        net = net_for(by_epoch, by_batch, GradientNormClipping(1.0), EpochScoring("accuracy"))
        _hooks.check(net, every)

    def test_scoring_of_a_net_that_the_client_never_has_is_refused_by_name(self):
        net = net_for(BatchScoring("accuracy", on_train=True, use_caching=False))
        with pytest.raises(ValueError, match=r"'c0' scores training batches .* Set use_caching=True"):
            _hooks.check(net, 0)

    @pytest.mark.parametrize("policy", ["ReduceLROnPlateau", torch.optim.lr_scheduler.ReduceLROnPlateau])
    def test_plateau_of_a_loss_that_ranks_do_not_share_is_refused_by_name(self, policy):
        net = net_for(LRScheduler(policy, step_every="batch"))
        _hooks.check(net, 0)
        for every in (3, None):
            with pytest.raises(ValueError, match="'c0' lowers the learning rate at a plateau"):
                _hooks.check(net, every)
