import pytest
import torch
from torch import nn

from daskps._standin import StandIn


@pytest.mark.parametrize(("images_per_row", "n_images"), [(2.0, 8), (0.5, 2), (0.01, 1)])
def test_computes_as_many_images_as_asked_for_each_row(images_per_row, n_images):
    module, seen = StandIn(20_000, 3, images_per_row), []
    module.dense.register_forward_hook(lambda layer, inputs, outputs: seen.append(len(outputs)))
    assert module(torch.zeros(4, 1, 8, 8)).shape == (4, 3)
    assert seen == [n_images]


def test_has_a_gradient_for_every_parameter():
    module = StandIn(20_000, 3, 1.0)
    nn.functional.cross_entropy(module(torch.zeros(4, 2)), torch.arange(4) % 3).backward()
    assert all(parameter.grad.any() for parameter in module.parameters())


def test_images_are_made_once_and_are_no_part_of_what_ranks_exchange():
    module = StandIn(20_000, 3, 1.0)
    module(torch.zeros(4, 2))
    images = module.images
    module(torch.zeros(3, 2))
    assert module.images is images
    assert not list(module.buffers())
