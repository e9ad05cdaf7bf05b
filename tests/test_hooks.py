import functools
import os

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import (
    BatchScoring,
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    Initializer,
    InputShapeSetter,
    LRScheduler,
    ParamMapper,
    PassthroughScoring,
    PrintLog,
    ProgressBar,
    TrainEndCheckpoint,
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

    @pytest.mark.parametrize("given", [3, None, GradientNormClipping], ids=repr)
    def test_needs_a_callback(self, given):
        with pytest.raises(TypeError, match=r"on_ranks needs .* an instance, got"):
            on_ranks(given)

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

    @pytest.mark.parametrize("of_the_net", [True, False])
    @pytest.mark.parametrize("own", [True, False])
    def test_the_net_overrules_the_callback(self, own, of_the_net):
        net = net_for(EpochScoring("accuracy", on_train=True, use_caching=own))
        net.set_params(use_caching=of_the_net)
        assert _hooks.wants_predictions(net) is of_the_net
        assert ("c0" in _hooks.scores_without_cache(net)) is not of_the_net


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

    def test_scoring_without_cache_by_order_of_the_net_is_refused_too(self):
        net = net_for(BatchScoring("accuracy", on_train=True)).set_params(use_caching=False)
        with pytest.raises(ValueError, match="'c0' scores training batches"):
            _hooks.check(net, 0)

    def test_policy_without_a_name_passes(self):
        policy = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        _hooks.check(net_for(LRScheduler(policy, step_every="batch")), None)

    def test_subclass_of_a_plateau_is_one(self):
        class OwnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
            pass

        net = net_for(LRScheduler(OwnPlateau, step_every="batch"))
        with pytest.raises(ValueError, match="'c0' lowers the learning rate at a plateau"):
            _hooks.check(net, None)


class TestCheckMonitors:
    @pytest.mark.parametrize("callback", [
        EarlyStopping(),
        EarlyStopping("valid_acc", lower_is_better=False),
        Checkpoint(),
        Checkpoint("valid_acc_best"),
        LRScheduler("ReduceLROnPlateau", monitor="valid_loss"),
    ], ids=lambda callback: f"{type(callback).__name__} {callback.monitor}")  # fmt: skip
    def test_score_of_validation_rows_is_refused_by_name(self, callback):
        with pytest.raises(ValueError, match=f"'c0' monitors '{callback.monitor}'"):
            _hooks.check_monitors(net_for(callback))

    @pytest.mark.parametrize("score", [
        EpochScoring("accuracy", name="mine"),
        BatchScoring("accuracy", name="mine"),
        PassthroughScoring("mine"),
    ], ids=lambda score: type(score).__name__)  # fmt: skip
    def test_score_of_another_callback_is_refused_if_it_is_of_validation_rows(self, score):
        with pytest.raises(ValueError, match="'c1' monitors 'mine'"):
            _hooks.check_monitors(net_for(score, EarlyStopping("mine")))
        _hooks.check_monitors(net_for(score.set_params(on_train=True) or score, EarlyStopping("mine")))

    @pytest.mark.parametrize("callback", [
        EarlyStopping("train_loss"),
        EarlyStopping("something_of_the_users_own"),
        Checkpoint("train_loss_best"),
        Checkpoint(monitor=None),
        Checkpoint(monitor=lambda net: True),
        LRScheduler("ReduceLROnPlateau", monitor="train_loss"),
        LRScheduler("ReduceLROnPlateau", monitor=lambda net: 1.0),
        LRScheduler("StepLR", monitor="valid_loss", step_size=1),
        EpochScoring("accuracy"),
        TrainEndCheckpoint(),
    ], ids=lambda callback: f"{type(callback).__name__}")  # fmt: skip
    def test_what_needs_no_validation_rows_passes(self, callback):
        _hooks.check_monitors(net_for(callback))


class TestFiles:
    def test_are_those_of_checkpoints(self, tmp_path):
        checkpoint = Checkpoint(dirname=str(tmp_path), fn_prefix="a_", f_pickle="net.pkl", f_optimizer=None)
        found = _hooks.files(net_for(checkpoint, PrintLog()))
        names = ("params.pt", "criterion.pt", "history.json", "net.pkl")
        assert found == {str(tmp_path / f"a_{name}") for name in names}

    def test_of_a_checkpoint_at_the_end(self, tmp_path):
        found = _hooks.files(net_for(TrainEndCheckpoint(dirname=str(tmp_path))))
        assert str(tmp_path / "train_end_params.pt") in found

    def test_are_absolute(self):
        assert all(map(os.path.isabs, _hooks.files(net_for(Checkpoint()))))

    def test_without_checkpoints_there_are_none(self):
        assert _hooks.files(net_for(EarlyStopping(), PrintLog())) == set()


class TestInputShapes:
    def test_are_set_from_the_data(self):
        net = net_for(InputShapeSetter("in_features"))
        _hooks.set_input_shapes(net, np.zeros((3, 7)), np.zeros(3))
        assert net.module_.in_features == 7

    def test_of_other_nets_are_left_alone(self):
        net = net_for(Watching())
        _hooks.set_input_shapes(net, np.zeros((3, 7)), np.zeros(3))
        assert net.module_.in_features == 2


@pytest.mark.parametrize(("callback", "expected"), [
    (Initializer("*"), True),
    (Freezer("*"), True),
    (ParamMapper("*"), True),
    (Watching(), False),
])  # fmt: skip
def test_callbacks_that_set_parameters(callback, expected):
    assert _hooks.sets_parameters(net_for(callback)) is expected


@pytest.mark.parametrize(("callback", "expected"), [
    (GradientNormClipping(1.0), False),
    (LRScheduler("StepLR", step_size=1), False),
    (on_ranks(PrintLog()), False),
    (OwnGradient(), True),
    (on_ranks(Watching()), True),
])  # fmt: skip
def test_callbacks_that_may_draw_random_numbers(callback, expected):
    assert _hooks.may_draw([("c0", callback)]) is expected


class TestWithoutCallbacks:
    def test_is_the_same_net_otherwise(self):
        net = net_for(Watching()).set_params(lr=0.3, batch_size=5)
        bare = _hooks.without_callbacks(net)
        assert type(bare) is type(net)
        expected = {**net.get_params(deep=False), "callbacks": "disable"}
        assert bare.get_params(deep=False).keys() == expected.keys()
        assert (bare.lr, bare.batch_size, bare.callbacks) == (0.3, 5, "disable")
        assert not getattr(bare, "initialized_", False)

    def test_leaves_the_net_alone(self):
        net = net_for(Watching())
        _hooks.without_callbacks(net)
        assert net.callbacks[0][0] == "c0"
        assert own(net.callbacks_) == ["c0"]

    def test_callback_that_can_no_longer_be_cloned_is_no_hindrance(self):
        net = net_for(Watching())
        dict(net.callbacks_)["c0"].losses = []
        assert _hooks.without_callbacks(net).initialize().callbacks_ == []
