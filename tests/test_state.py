import io
import pickle

import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import LRScheduler
from torch import nn

from daskps import _state


class Mixed(nn.Module):
    """Parameters and buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.norm = nn.BatchNorm1d(3)

    def forward(self, X):
        return self.norm(self.layer(X) * self.scale + self.narrow + X @ self.turned.t())


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


def net_for(module=Mixed, **options):
    torch.manual_seed(0)
    options = {"criterion": nn.CrossEntropyLoss, "optimizer": torch.optim.Adam, **options}
    return NeuralNetClassifier(module, **options).initialize()


def train(net, n_steps=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        X = torch.randn(8, 4, generator=generator)
        net.train_step((X, torch.arange(8) % 3))
    return net


def tensors(net):
    state = net.optimizer_.state
    of_optimizer = [v for p in net.module_.parameters() for v in state[p].values()]
    return [*net.module_.state_dict().values(), *net.criterion_.state_dict().values(), *of_optimizer]


def same(net, other):
    pairs = list(zip(tensors(net), tensors(other), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class TestDumpAndLoad:
    @pytest.mark.parametrize("optimizer", [
        {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9},
        {"optimizer": torch.optim.Adam},
        {"optimizer": torch.optim.LBFGS, "module": Plain},
    ], ids=["momentum", "adam", "lbfgs"])  # fmt: skip
    def test_loaded_net_goes_on_bit_for_bit(self, optimizer):
        net = train(net_for(**optimizer))
        other = clone(net).initialize()
        _state.load(other, _state.dump(net))
        train(net, seed=1)
        train(other, seed=1)
        for ours, theirs in zip(net.module_.parameters(), other.module_.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def test_everything_that_a_step_changes_is_in_it(self):
        net = train(net_for(criterion__weight=torch.tensor([1.0, 2.0, 3.0])))
        other = clone(net).initialize()
        assert not same(net, train(other, seed=5))
        _state.load(other, _state.dump(net))
        assert same(net, other)

    def test_loaded_values_are_shared_with_nobody(self):
        net = train(net_for())
        state = _state.dump(net)
        first, second = clone(net).initialize(), clone(net).initialize()
        _state.load(first, state)
        _state.load(second, state)
        train(first, seed=3)
        assert same(net, second)
        assert not same(first, second)

    def test_optimizer_stays_the_nets_own(self):
        net = train(net_for())
        other = clone(net).initialize()
        parameters = list(other.module_.parameters())
        _state.load(other, _state.dump(net))
        assert all(a is b for a, b in zip(parameters, other.module_.parameters(), strict=True))
        held = [p for group in other.optimizer_.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(parameters, held, strict=True))

    def test_net_that_is_dumped_is_not_changed(self):
        net = train(net_for())
        before = [tensor.clone() for tensor in tensors(net)]
        _state.dump(net)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(net), strict=True))

    def test_state_of_another_module_is_an_error(self):
        other = NeuralNetClassifier(nn.Linear, module__in_features=4, module__out_features=3)
        with pytest.raises(RuntimeError, match="state_dict"):
            _state.load(other.initialize(), _state.dump(net_for()))


class TestSettings:
    def test_rates_and_frozen_parameters_travel(self):
        net, other = net_for(), net_for()
        net.optimizer_.param_groups[0].update(lr=0.125, weight_decay=0.5)
        net.module_.layer.requires_grad_(False)
        _state.load_settings(other, _state.dump_settings(net))
        assert other.optimizer_.param_groups[0]["lr"] == 0.125
        assert other.optimizer_.param_groups[0]["weight_decay"] == 0.5
        assert [p.requires_grad for p in other.module_.layer.parameters()] == [False, False]
        assert other.module_.scale.requires_grad

    def test_thawed_parameters_travel(self):
        net, other = net_for(), net_for()
        other.module_.requires_grad_(False)
        _state.load_settings(other, _state.dump_settings(net))
        assert all(p.requires_grad for p in other.module_.parameters())

    def test_every_group_gets_its_own(self):
        groups = [("layer.*", {"lr": 0.5}), ("scale", {"lr": 0.25})]
        net = net_for(optimizer__param_groups=groups)
        other = net_for(optimizer__param_groups=groups)
        for number, group in enumerate(net.optimizer_.param_groups):
            group["lr"] = 2.0**number
        _state.load_settings(other, _state.dump_settings(net))
        assert [group["lr"] for group in other.optimizer_.param_groups] == [1.0, 2.0, 4.0]

    def test_values_and_parameters_of_the_groups_stay(self):
        net, other = train(net_for()), net_for()
        before = [value.clone() for value in other.module_.state_dict().values()]
        held = other.optimizer_.param_groups[0]["params"]
        _state.load_settings(other, _state.dump_settings(net))
        now = other.module_.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert other.optimizer_.param_groups[0]["params"] is held


class TestCallbacks:
    @pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
    def test_schedule_is_tied_to_the_net_that_it_is_loaded_into(self):
        given = [("schedule", LRScheduler("StepLR", step_size=1, gamma=0.5))]
        net = net_for(callbacks=given, optimizer=torch.optim.SGD, lr=0.5)
        schedule = dict(net.callbacks_)["schedule"]
        schedule.on_train_begin(net)
        other = net_for(optimizer=torch.optim.SGD, lr=0.5)
        data = _state.dump_callbacks(net, net.callbacks_)
        loaded = dict(_state.load_callbacks(other, data))["schedule"]
        assert loaded.lr_scheduler_.optimizer is other.optimizer_
        other.optimizer_.step()
        loaded.lr_scheduler_.step()
        assert other.optimizer_.param_groups[0]["lr"] == 0.25
        assert net.optimizer_.param_groups[0]["lr"] == 0.5

    def test_parts_of_the_net_do_not_travel(self):
        net = net_for()
        holder = {"net": net, "module": net.module_, "optimizer": net.optimizer_, "own": [1, 2]}
        data = _state.dump_callbacks(net, [("holder", holder)])
        assert len(data) < 1000
        other = net_for()
        ((_, loaded),) = _state.load_callbacks(other, data)
        assert loaded["net"] is other
        assert loaded["module"] is other.module_
        assert loaded["optimizer"] is other.optimizer_
        assert loaded["own"] == [1, 2]


class TestBytes:
    @pytest.mark.parametrize("value", [
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([1j]),
        torch.randn(3, 4).t(),
        torch.tensor(2.5),
        torch.empty(0, 3),
    ])  # fmt: skip
    def test_any_tensor_comes_back_bit_for_bit(self, value):
        back = _state.from_bytes(_state.to_bytes(value))
        assert back.dtype == value.dtype
        assert torch.equal(back, value)

    def test_result_is_plain_bytes(self):
        data = _state.to_bytes({"a": 1})
        assert type(data) is bytes
        assert torch.load(io.BytesIO(data), weights_only=False) == {"a": 1}
        assert pickle.loads(pickle.dumps(data)) == data
