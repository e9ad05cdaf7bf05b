import pytest
import torch
from torch import nn

from daskps import _emulation, _workload
from daskps._emulation import Waiting


@pytest.fixture
def waited(monkeypatch):
    times = []
    monkeypatch.setattr(_emulation, "sleep", times.append)
    return times


def test_waits_for_a_fixed_part_and_for_each_row(waited):
    module = Waiting(10, 3, c0=0.5, c1=0.25)
    module(torch.zeros(4, 1, 8, 8))
    module(torch.zeros(1, 1, 8, 8))
    assert waited == [1.5, 0.75]


def test_has_logits_and_a_gradient_for_every_parameter(waited):
    module = Waiting(1000, 3, 0.0, 0.0)
    logits = module(torch.zeros(4, 2))
    nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    (parameter,) = module.parameters()
    assert logits.shape == (4, 3)
    assert parameter.grad.shape == (1000,)
    assert not parameter.grad.any()


def test_net_has_as_many_parameters_as_the_one_whose_place_it_takes(waited):
    split = _workload.load("synthetic", 64)
    real = _workload.new_net(split, 32, 1).initialize()
    emulated = _workload.waiting_net(split, 32, 1, 0.002, 0.001).fit(split.X_train, split.y_train)

    def size(net):
        return sum(parameter.numel() for parameter in net.module_.parameters())

    assert size(emulated) == size(real) == 421_642
    assert waited == [0.034, 0.034]
