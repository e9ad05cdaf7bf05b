import threading

import numpy as np
import pytest
import torch
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Callback, EpochScoring, LRScheduler, PrintLog
from torch import nn

from daskps import _master
from daskps._inputs import TrainingData


class Rows(nn.Module):
    """Eight features to ``n`` outputs."""

    def __init__(self, n=3, ndim=2):
        super().__init__()
        self.layer = nn.Linear(8, n)
        self.ndim = ndim

    def forward(self, X):
        return self.layer(X) if self.ndim == 2 else self.layer(X)[:, 0]


class Locked(Callback):
    def __init__(self):
        self.lock = threading.Lock()


class Changing(Callback):
    """Does in its constructor what sklearn's clone finds out."""

    def __init__(self, names):
        self.names = list(names)


class OwnLoop(NeuralNetClassifier):
    def fit_loop(self, X, y=None, epochs=None, **fit_params):
        return self


class OwnEpoch(NeuralNetClassifier):
    def run_single_epoch(self, *args, **kwargs):
        pass


class OwnSteps(NeuralNetClassifier):
    def train_step(self, batch, **fit_params):
        return super().train_step(batch, **fit_params)

    def validation_step(self, batch, **fit_params):
        return super().validation_step(batch, **fit_params)


class ReducedLoss(NeuralNetClassifier):
    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs).mean()


class OwnCriterion(nn.Module):
    def forward(self, y_pred, y_true):
        return nn.functional.cross_entropy(y_pred, y_true)


def net_for(kind=NeuralNetClassifier, module=Rows, **options):
    torch.manual_seed(0)
    return kind(module, **{"criterion": nn.CrossEntropyLoss, "train_split": None, **options})


def check(net, n_classes=3, n_rows=100, every=0, weights=None, X=None):
    X = np.ones((n_rows, 8), "float32") if X is None else X
    data = TrainingData(X, np.arange(len(X)) % n_classes, np.arange(n_classes), weights)
    _master.check(_master.build(net), torch.as_tensor(X[:2]), data, n_rows, every)


class TestBuild:
    def test_is_an_initialised_copy(self):
        given = net_for(lr=0.25)
        built = _master.build(given)
        assert built.initialized_
        assert built.lr == 0.25
        assert built is not given
        assert not hasattr(given, "module_")

    def test_has_new_weights_even_if_the_given_net_is_trained(self):
        given = net_for().initialize()
        before = given.module_.layer.weight.detach().clone()
        built = _master.build(given)
        assert not torch.equal(built.module_.layer.weight, before)
        assert torch.equal(given.module_.layer.weight, before)

    def test_takes_the_weights_of_plain_skorch_under_the_same_seed(self):
        torch.manual_seed(3)
        plain = net_for().initialize().module_.layer.weight
        built = _master.build(net_for()).module_.layer.weight
        assert torch.equal(built, plain)

    @pytest.mark.parametrize("net", [
        NeuralNetRegressor(Rows), NeuralNet(Rows, criterion=nn.CrossEntropyLoss), Rows(),
        NeuralNetClassifier, "net", 3,
    ], ids=["regressor", "general", "module", "class", "text", "number"])  # fmt: skip
    def test_what_is_no_classifier_is_refused(self, net):
        with pytest.raises(TypeError, match="The 'net' parameter must be an instance of"):
            _master.build(net)

    @pytest.mark.parametrize(("net", "method"), [
        (OwnLoop, "fit_loop"), (OwnEpoch, "run_single_epoch"),
    ])  # fmt: skip
    def test_own_loops_are_refused_by_name(self, net, method):
        with pytest.raises(TypeError, match=f"{net.__name__} overrides {method}"):
            _master.build(net_for(net))

    def test_own_steps_are_welcome(self):
        assert _master.build(net_for(OwnSteps)).initialized_

    @pytest.mark.parametrize("iterator", ["iterator_train", "iterator_valid"])
    @pytest.mark.parametrize(("option", "value"), [
        ("sampler", [0, 1]), ("batch_sampler", [[0, 1]]), ("num_workers", 2),
    ])  # fmt: skip
    def test_iterator_options_that_cannot_be_are_refused_by_name(self, iterator, option, value):
        name = f"{iterator}__{option}"
        with pytest.raises(ValueError, match=f"{name}.* is not possible"):
            _master.build(net_for(**{name: value}))

    def test_iterator_options_that_change_nothing_are_taken(self):
        options = {"iterator_train__num_workers": 0, "iterator_train__sampler": None}
        assert _master.build(net_for(**options)).initialized_

    @pytest.mark.parametrize("callback", [Locked(), Changing(("a", "b"))], ids=["lock", "changing"])
    @pytest.mark.parametrize("named", [False, True])
    def test_callback_that_cannot_be_cloned_is_named(self, callback, named):
        given = [("mine", callback)] if named else [callback]
        name = "mine" if named else type(callback).__name__
        with pytest.raises(TypeError, match=f"callback '{name}' .* cannot be cloned"):
            _master.build(net_for(callbacks=given))

    @pytest.mark.parametrize("callbacks", [
        None, "disable", [], [PrintLog], [EpochScoring("accuracy")],
        [("schedule", LRScheduler("StepLR", step_size=1))],
    ])  # fmt: skip
    def test_callbacks_of_all_forms_are_taken(self, callbacks):
        assert _master.build(net_for(callbacks=callbacks)).initialized_

    def test_misspelt_option_is_named(self):
        net = net_for()
        net.set_params(optimizr__momentum=0.9)
        with pytest.raises(ValueError, match=r"unexpected argument.* optimizr__momentum"):
            _master.build(net)


class TestCheck:
    @pytest.mark.parametrize("every", [0, 1, None])
    def test_good_net_passes(self, every):
        check(net_for(), every=every)

    def test_more_outputs_than_classes_pass(self):
        check(net_for(module__n=10))

    @pytest.mark.parametrize(("n", "ndim", "width"), [(2, 2, 2), (1, 2, 1), (3, 1, 1)])
    def test_too_few_outputs_are_refused_with_both_numbers(self, n, ndim, width):
        net = net_for(module__n=n, module__ndim=ndim)
        with pytest.raises(ValueError, match=f"has {width} outputs, y has 3 classes"):
            check(net)

    @pytest.mark.parametrize(("pack", "kind"), [(dict, "dict"), (list, "list"), (tuple, "tuple")])
    def test_output_that_is_no_tensor_is_refused_by_its_type(self, pack, kind):
        class Packed(nn.Linear):
            def forward(self, X):
                return pack()

        net = _master.build(net_for(module=Packed(8, 3)))
        with pytest.raises(ValueError, match=f"returns a {kind}: a tensor is needed"):
            _master.check_module(net, torch.ones(2, 8), 3)

    def test_rows_that_the_module_cannot_take_are_refused_with_their_shape(self):
        X = np.ones((20, 1, 5, 5), "float32")
        with pytest.raises(ValueError, match=r"shape \(1, 5, 5\) and dtype float32: .*shapes"):
            check(net_for(), n_rows=20, X=X)

    @pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "int64", "bool"])
    def test_rows_of_another_dtype_pass(self, dtype):
        check(net_for(), n_rows=20, X=np.ones((20, 8), dtype))

    def test_batch_normalisation_is_not_trained_by_the_check(self):
        class Normalised(nn.Sequential):
            def __init__(self):
                super().__init__(nn.BatchNorm1d(8), nn.Linear(8, 3))

        net = _master.build(net_for(module=Normalised))
        _master.check_module(net, torch.full((2, 8), 5.0), 3)
        assert net.module_[0].running_mean.tolist() == [0.0] * 8

    def test_random_numbers_of_the_check_are_not_missed_afterwards(self):
        class Noisy(Rows):
            def forward(self, X):
                return super().forward(X + torch.randn_like(X))

        net = _master.build(net_for(module=Noisy))
        before = torch.get_rng_state()
        _master.check_module(net, torch.ones(2, 8), 3)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("every", [1, 7, None])
    def test_sum_of_losses_needs_batch_mode(self, every):
        with pytest.raises(ValueError, match="criterion__reduction='sum' needs sync_every='batch'"):
            check(net_for(criterion__reduction="sum"), every=every)

    def test_sum_of_losses_in_batch_mode_passes(self):
        check(net_for(criterion__reduction="sum"), every=0)

    @pytest.mark.parametrize("epochs", [1.5, "3", None])
    def test_epochs_that_are_no_number_are_refused(self, epochs):
        with pytest.raises(ValueError, match=f"max_epochs must be an integer, got {epochs!r}"):
            check(net_for(max_epochs=epochs))

    def test_fit_without_a_step_is_refused_with_its_numbers(self):
        net = net_for(batch_size=32, iterator_train__drop_last=True)
        with pytest.raises(ValueError, match="20 training rows make no batch of 32 rows"):
            check(net, n_rows=20)
        check(net, n_rows=32)

    def test_binary_classifier_knows_two_classes(self):
        net = net_for(
            NeuralNetBinaryClassifier, criterion=nn.BCEWithLogitsLoss, module__n=1, module__ndim=1
        )
        check(net, n_classes=2)
        with pytest.raises(ValueError, match="knows 2 classes, y has 3"):
            check(net, n_classes=3)


class TestWeighting:
    WEIGHTS = np.arange(100) + 1.0

    def test_of_torchs_losses_passes(self):
        check(net_for(), weights=self.WEIGHTS)

    def test_of_a_criterion_without_rows_is_refused_by_name(self):
        with pytest.raises(ValueError, match="criterion OwnCriterion: it has no 'reduction'"):
            check(net_for(criterion=OwnCriterion), weights=self.WEIGHTS)
        check(net_for(criterion=OwnCriterion))

    def test_of_a_get_loss_that_reduces_is_refused_by_name(self):
        net = net_for(ReducedLoss, criterion__reduction="none")
        with pytest.raises(ValueError, match=r"ReducedLoss\.get_loss: it returns one number"):
            check(net, weights=self.WEIGHTS)
        check(net)


class TestGoOn:
    def test_is_a_copy_in_the_same_state(self):
        net = net_for(optimizer=torch.optim.Adam).initialize()
        net.train_step((torch.ones(4, 8), torch.tensor([0, 1, 2, 0])))
        net.history.new_epoch()
        copy = _master.go_on(net)
        assert torch.equal(copy.module_.layer.weight, net.module_.layer.weight)
        assert copy.module_.layer.weight is not net.module_.layer.weight
        state = copy.optimizer_.state[copy.module_.layer.weight]
        assert torch.equal(state["exp_avg"], net.optimizer_.state[net.module_.layer.weight]["exp_avg"])
        assert copy.history == net.history
        assert copy.history is not net.history

    def test_what_the_copy_learns_does_not_reach_the_net(self):
        net = net_for().initialize()
        before = net.module_.layer.weight.detach().clone()
        copy = _master.go_on(net)
        copy.train_step((torch.ones(4, 8), torch.tensor([0, 1, 2, 0])))
        copy.history.new_epoch()
        assert torch.equal(net.module_.layer.weight, before)
        assert len(net.history) == 0
