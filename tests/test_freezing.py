import threading

import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, LRScheduler
from torch import nn

from daskps._freezing import copied, freeze, thaw


def net_for(**options):
    torch.manual_seed(0)
    return NeuralNetClassifier(
        nn.Linear,
        module__in_features=4,
        module__out_features=3,
        criterion=nn.CrossEntropyLoss,
        verbose=0,
        **{"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "lr": 0.5, **options},
    )


def batch():
    return torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 3


def trained(**options):
    X, y = batch()
    return net_for(max_epochs=2, train_split=None, **options).fit(X.numpy(), y.numpy())


class TestThaw:
    def test_net_goes_on_as_if_nothing_had_been(self):
        net = trained()
        other = thaw(freeze(net))
        net.partial_fit(*batch())
        other.partial_fit(*batch())
        assert torch.equal(net.module_.weight, other.module_.weight)
        assert other.history[:, "train_loss"] == net.history[:, "train_loss"]

    def test_predictions_are_the_same(self):
        net = trained()
        other = thaw(freeze(net))
        assert (other.predict_proba(batch()[0]) == net.predict_proba(batch()[0])).all()
        assert other.classes_.tolist() == net.classes_.tolist()

    def test_schedule_is_tied_to_the_new_optimizer(self):
        schedule = ("schedule", LRScheduler("StepLR", step_size=1, gamma=0.5))
        other = thaw(freeze(trained(callbacks=[schedule])))
        assert dict(other.callbacks_)["schedule"].lr_scheduler_.optimizer is other.optimizer_

    def test_no_random_number_is_drawn(self):
        data = freeze(trained())
        before = torch.get_rng_state()
        thaw(data)
        assert torch.equal(torch.get_rng_state(), before)

    def test_net_that_is_not_initialised_stays_so(self):
        other = thaw(freeze(net_for()))
        assert other.lr == 0.5
        assert not hasattr(other, "module_")

    def test_module_of_a_function_is_written_by_value(self):
        class Local(nn.Linear):
            def __init__(self):
                super().__init__(4, 3)

        net = NeuralNetClassifier(Local, criterion=nn.CrossEntropyLoss, train_split=None, verbose=0)
        other = thaw(freeze(net.fit(batch()[0].numpy(), batch()[1].numpy())))
        assert torch.equal(other.module_.weight, net.module_.weight)


class TestCopied:
    @pytest.mark.parametrize("change", [
        lambda net: net.module_.weight.data.zero_(),
        lambda net: net.history.record("extra", 1),
        lambda net: net.history[-1]["batches"].clear(),
        lambda net: dict(net.callbacks_)["mine"].seen_.append(1),
        lambda net: net.optimizer_.param_groups[0].update(lr=9.0),
        lambda net: net.optimizer_.state[net.module_.weight]["momentum_buffer"].zero_(),
    ], ids=["weights", "history", "batches", "callback", "rate", "momentum"])  # fmt: skip
    def test_copy_shares_nothing(self, change):
        class Mine(Callback):
            def initialize(self):
                self.seen_ = []
                return self

        net = trained(callbacks=[("mine", Mine())])
        copy = copied(net)
        change(copy)
        assert net.module_.weight.abs().max() > 0
        assert "extra" not in net.history[-1]
        assert len(net.history[-1]["batches"]) == 1
        assert dict(net.callbacks_)["mine"].seen_ == []
        assert net.optimizer_.param_groups[0]["lr"] == 0.5
        assert net.optimizer_.state[net.module_.weight]["momentum_buffer"].abs().max() > 0


class TestSettings:
    def test_frozen_parameters_stay_frozen(self):
        net = trained()
        net.module_.bias.requires_grad_(False)
        other = thaw(freeze(net))
        assert not other.module_.bias.requires_grad
        assert other.module_.weight.requires_grad

    def test_learning_rate_that_was_set_is_kept(self):
        net = trained().set_params(lr=0.125)
        assert thaw(freeze(net)).optimizer_.param_groups[0]["lr"] == 0.125


class TestCallbacks:
    def test_of_the_parameters_are_those_in_use(self):
        net = trained(callbacks=[("mine", Callback()), ("lr", LRScheduler("StepLR", step_size=1))])
        other = thaw(freeze(net))
        in_use = dict(other.callbacks_)
        assert [name for name, _ in other.callbacks] == ["mine", "lr"]
        assert all(in_use[name] is callback for name, callback in other.callbacks)

    def test_attributes_that_are_no_parameters_are_kept(self):
        net = trained(callbacks=[("mine", Callback())])
        dict(net.callbacks_)["mine"].losses = [1.0]
        assert dict(thaw(freeze(net)).callbacks_)["mine"].losses == [1.0]

    def test_one_that_cannot_be_pickled_is_named(self):
        net = trained(callbacks=[("fine", Callback()), ("locked", Callback())])
        dict(net.callbacks_)["locked"].lock_ = threading.Lock()
        with pytest.raises(TypeError, match="'locked'"):
            freeze(net)
