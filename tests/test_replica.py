import random

import numpy as np
import pytest
import torch
from dask.sizeof import sizeof
from ranks import RULES, replica_of
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EpochScoring
from torch import nn

from daskps import _replica


class Doubling:
    """A sync that stands for another rank with the same gradient and a loss of 7."""

    diverged = False
    lockstep = True

    def __init__(self, net):
        self.net = net
        self.calls = []

    def backward_follows(self, weight):
        pass

    def gradients(self, weight, loss):
        self.calls.append((weight, loss))
        for parameter in self.net.module_.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return 7.0


class UsersNet(NeuralNetClassifier):
    """Overrides what a replica overrides too."""

    def infer(self, x, **fit_params):
        self.seen_dtype_ = x.dtype
        return super().infer(x, **fit_params)

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return 3 * super().get_loss(y_pred, y_true, *args, **kwargs)

    def on_grad_computed(self, net, named_parameters, **kwargs):
        self.seen_gradients_ = [p.grad.clone() for _, p in named_parameters]


class OwnLoss(NeuralNetClassifier):
    """Computes its loss without get_loss."""

    def train_step_single(self, batch, **fit_params):
        X, y = batch
        y_pred = self.infer(X)
        loss = nn.functional.cross_entropy(y_pred, y)
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}


class TwoOptimizers(NeuralNetClassifier):
    def initialize_module(self):
        super().initialize_module()
        self.second_ = nn.Linear(2, 2)
        return self

    def initialize_optimizer(self, *args, **kwargs):
        super().initialize_optimizer(*args, **kwargs)
        self.other_ = torch.optim.SGD(self.second_.parameters(), lr=1.0)
        return self


def net_for(kind=NeuralNetClassifier, **options):
    torch.manual_seed(0)
    defaults = {
        "module": nn.Linear,
        "module__in_features": 4,
        "module__out_features": 3,
        "criterion": nn.CrossEntropyLoss,
        "optimizer": torch.optim.SGD,
        "optimizer__momentum": 0.9,
        "lr": 0.1,
    }
    return kind(**{**defaults, **options}).initialize()


def batch(n_rows=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_rows, 4, generator=generator).to(dtype), torch.arange(n_rows) % 3


def synchronised(net):
    replica = replica_of(net)
    replica.sync_ = Doubling(replica)
    return replica


class TestBuild:
    def test_replica_is_in_the_state_of_the_net(self):
        net = net_for()
        net.train_step(batch())
        replica = replica_of(net)
        net.train_step(batch())
        replica.train_step(batch())
        assert torch.equal(replica.module_.weight, net.module_.weight)

    def test_replica_shares_nothing_with_the_net(self):
        net = net_for()
        before = net.module_.weight.detach().clone()
        replica_of(net).train_step(batch())
        assert torch.equal(net.module_.weight, before)

    def test_optimizer_is_bound_to_the_replicas_own_parameters(self):
        replica = replica_of(net_for())
        held = replica.optimizer_.param_groups[0]["params"]
        assert all(a is b for a, b in zip(held, replica.module_.parameters(), strict=True))

    def test_replica_is_of_the_users_class_and_knows_it(self):
        replica = replica_of(net_for(UsersNet))
        assert isinstance(replica, UsersNet)
        assert _replica.owner(replica) is UsersNet

    def test_callbacks_and_output_stay_with_the_client(self):
        net = net_for(callbacks=[("score", EpochScoring("accuracy"))], verbose=1)
        replica = replica_of(net)
        assert replica.callbacks_ == []
        assert replica.verbose == 0
        assert "score" in dict(net.callbacks_)

    def test_no_random_number_is_drawn(self):
        net = net_for()
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        replica_of(net)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])

    def test_all_modules_and_optimizers_of_the_user_are_there(self):
        net = net_for(TwoOptimizers)
        with torch.no_grad():
            net.second_.weight.fill_(5.0)
        replica = replica_of(net)
        assert replica.second_.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]
        assert replica.other_.param_groups[0]["params"][0] is replica.second_.weight

    def test_criterion_with_parameters_is_loaded(self):
        class Learned(nn.CrossEntropyLoss):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, y_pred, y_true):
                return super().forward(y_pred * self.scale, y_true)

        net = net_for(criterion=Learned)
        net.train_step(batch())
        assert torch.equal(replica_of(net).criterion_.scale, net.criterion_.scale)


class TestOpening:
    def test_brings_how_often_to_meet_and_the_rules_of_the_run(self):
        opening = _replica.open_with(net_for(), 3, b"", RULES)
        assert (opening.every, opening.rules, opening.callbacks) == (3, RULES, b"")

    def test_is_a_tuple_so_that_dask_sees_its_size(self):
        net = net_for(module__in_features=1000)
        opening = _replica.open_with(net, None, b"", RULES)
        assert isinstance(opening, tuple)
        assert sizeof(opening) > net.module_.weight.nbytes


class TestMeeting:
    def test_is_after_backward_and_before_the_step(self):
        net = net_for(optimizer__momentum=0.0)
        replica = synchronised(net)
        before = net.module_.weight.detach().clone()
        net.train_step(batch())
        replica.train_step(batch())
        step, double_step = net.module_.weight - before, replica.module_.weight - before
        assert torch.allclose(double_step, 2 * step)

    def test_comes_before_the_users_own_hook(self):
        net = net_for(UsersNet)
        replica = synchronised(net)
        net.train_step(batch())
        replica.train_step(batch())
        for ours, theirs in zip(replica.seen_gradients_, net.seen_gradients_, strict=True):
            assert torch.allclose(ours, 2 * theirs)

    def test_comes_before_callbacks(self):
        class Watching(Callback):
            def on_grad_computed(self, net, named_parameters, **kwargs):
                self.gradients_ = [p.grad.clone() for _, p in named_parameters]

        net = net_for()
        replica = synchronised(net)
        watching = Watching()
        replica.callbacks_ = [("watching", watching)]
        net.train_step(batch())
        replica.train_step(batch())
        assert torch.allclose(watching.gradients_[0], 2 * net.module_.weight.grad)

    def test_brings_the_rows_and_the_loss_of_the_net(self):
        net = net_for(UsersNet)
        replica = synchronised(net)
        replica.train_step(batch())
        ((weight, loss),) = replica.sync_.calls
        assert weight == 8.0
        assert loss == pytest.approx(net.train_step_single(batch())["loss"].item())

    def test_loss_of_the_step_is_the_combined_one(self):
        replica = synchronised(net_for())
        assert replica.train_step(batch())["loss"].item() == 7.0
        assert replica.step_weight_ == 8.0

    def test_every_meeting_is_counted(self):
        replica = synchronised(net_for())
        for expected in (1, 2, 3):
            replica.train_step(batch())
            assert replica.rounds_ == expected

    def test_weights_do_not_add_up_over_steps(self):
        replica = synchronised(net_for())
        replica.train_step(batch(8))
        replica.train_step(batch(5))
        assert [weight for weight, _ in replica.sync_.calls] == [8.0, 5.0]

    def test_validation_and_prediction_bring_nothing(self):
        replica = synchronised(net_for())
        replica.validation_step(batch())
        replica.evaluation_step((batch()[0], None))
        replica.train_step(batch(5))
        assert [weight for weight, _ in replica.sync_.calls] == [5.0]

    def test_step_without_get_loss_is_weighted_by_rows(self):
        replica = synchronised(net_for(OwnLoss))
        replica.train_step(batch())
        ((weight, loss),) = replica.sync_.calls
        assert weight == 8.0
        assert loss == pytest.approx(net_for(OwnLoss).train_step_single(batch())["loss"].item())
        replica.train_step(batch(5))
        assert replica.sync_.calls[1][0] == 5.0


class TestIdleStep:
    def test_brings_nothing_and_returns_the_loss_of_the_others(self):
        replica = synchronised(net_for())
        assert replica.idle_step() == 7.0
        ((weight, loss),) = replica.sync_.calls
        assert weight == 0.0
        assert np.isnan(loss)
        assert replica.step_weight_ == 0.0

    def test_forgets_the_gradient_of_the_step_before(self):
        replica = synchronised(net_for(optimizer__momentum=0.0))
        replica.train_step(batch())
        before = replica.module_.weight.detach().clone()
        replica.idle_step()
        assert torch.equal(replica.module_.weight, before)

    def test_makes_a_step_with_the_gradient_of_the_others(self):
        replica = synchronised(net_for(optimizer__momentum=0.0))

        def gradients(weight, loss):
            replica.module_.bias.grad = torch.ones(3)
            return 7.0

        replica.sync_.gradients = gradients
        before = replica.module_.bias.detach().clone()
        replica.idle_step()
        assert (before - replica.module_.bias).tolist() == pytest.approx([0.1] * 3)


class OwnSteps(NeuralNetClassifier):
    """Two meetings in each step."""

    def train_step(self, batch, **fit_params):
        for _ in range(2):
            self._zero_grad_optimizer()
            step = self.train_step_single(batch)
            named = list(self.module_.named_parameters())
            self.notify("on_grad_computed", named_parameters=named, batch=batch)
        self.optimizer_.step()
        return step


class TestShadowStep:
    def test_is_for_nets_with_steps_of_their_own(self):
        assert not synchronised(net_for(UsersNet)).steps_its_own_way_
        assert synchronised(net_for(OwnSteps)).steps_its_own_way_

    def test_meets_as_often_as_a_step_and_its_rows_count_nothing(self):
        replica = synchronised(net_for(OwnSteps))
        assert replica.shadow_step(batch()) == 7.0
        assert [weight for weight, _ in replica.sync_.calls] == [0.0, 0.0]
        assert replica.step_weight_ == 0.0

    def test_rows_count_again_afterwards(self):
        replica = synchronised(net_for(OwnSteps))
        replica.shadow_step(batch())
        replica.train_step(batch(5))
        assert [weight for weight, _ in replica.sync_.calls] == [0.0, 0.0, 5.0, 5.0]


class AddsToLoss(NeuralNetClassifier):
    def train_step_single(self, batch, **fit_params):
        step = super().train_step_single(batch, **fit_params)
        return {**step, "loss": step["loss"] + 1.0}


class TestLoss:
    def test_of_the_step_is_the_one_that_ranks_share(self):
        """Not that of get_loss: an optimizer's closure returns what the step does."""
        net = net_for(AddsToLoss)
        replica = synchronised(net)
        outcome = replica.train_step(batch())
        ((weight, loss),) = replica.sync_.calls
        assert weight == 8.0
        assert loss == pytest.approx(net.train_step_single(batch())["loss"].item())
        assert outcome["loss"].item() == 7.0


class TestInput:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8])
    def test_is_cast_before_the_users_infer_sees_it(self, dtype):
        replica = replica_of(net_for(UsersNet))
        replica.train_step(batch(dtype=dtype))
        assert replica.seen_dtype_ == torch.float32

    def test_of_doubles_gives_the_step_of_floats(self):
        first, second = replica_of(net_for()), replica_of(net_for())
        X, y = batch()
        first.train_step((X, y))
        second.train_step((X.double(), y))
        assert torch.equal(first.module_.weight, second.module_.weight)
