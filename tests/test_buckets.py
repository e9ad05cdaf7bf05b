"""Gradients that leave while backward still computes others."""

import numpy as np
import pytest
import torch
from ranks import combined
from torch import nn

from daskps._buckets import GradientExchange, room_for, split
from daskps._packing import bytes_of
from daskps.exceptions import DaskpsError


class Recorder:
    """A channel without other ranks that notes what happens."""

    n_not_finite = 0

    def __init__(self, events):
        self.events = events
        self.pushed = []

    def allocate(self, size, dtype):
        self.room = np.full(size, 255, "uint8").view(dtype)
        return self.room

    def push_pull(self, values, weight, reduction, narrow=0):
        self.push(values, weight, reduction, narrow)
        return self.pull()

    def push(self, values, weight, reduction, narrow=0):
        self.events.append(f"push {len(values)}")
        self.pushed.append((values, weight, values.copy()))

    def pull(self):
        values, weight, then = self.pushed.pop(0)
        assert np.array_equal(values, then, equal_nan=True)  # nothing has written over it meanwhile
        self.events.append(f"pull {len(values)}")
        return values / weight if weight else values[:0]


class Noting(nn.Module):
    """Notes when backward passes by."""

    def __init__(self, events, name):
        super().__init__()
        self.events, self.name = events, name

    def forward(self, X):
        X.register_hook(lambda _: self.events.append(self.name))
        return X


class Case:
    """Three layers of 2, 6 and 12 parameters, and what happens in a step of theirs."""

    def __init__(self, bucket_bytes):
        torch.manual_seed(0)
        self.events = []
        self.first, self.second, self.third = nn.Linear(1, 1), nn.Linear(1, 3), nn.Linear(3, 3)
        noting = Noting(self.events, "below third"), Noting(self.events, "below second")
        self.net = nn.Sequential(self.first, noting[1], self.second, noting[0], self.third)
        self.channel = Recorder(self.events)
        parameters = list(self.net.parameters())
        self.exchange = GradientExchange(parameters, self.channel, "mean", bucket_bytes)

    def loss(self):
        return self.net(torch.ones(2, 1)).square().mean()

    def step(self, weight=2.0, weight_after=None, backward=torch.Tensor.backward):
        self.net.zero_grad()
        loss = self.loss()
        self.exchange.backward_follows(lambda: weight)
        backward(loss)
        self.events.append("done")
        grads = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
        after = weight if weight_after is None else weight_after
        return grads, self.exchange.finish(after, loss.item()), loss.item()


class TestSplit:
    def sizes(self, n_bytes, *sizes):
        parameters = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        return [[len(p) for p in bucket] for bucket in split(parameters, n_bytes)]

    def test_no_size_is_one_bucket(self):
        assert self.sizes(0, 3, 1, 2) == [[2, 1, 3]]

    def test_begins_with_the_last_parameters_and_closes_when_full(self):
        assert self.sizes(8, 3, 1, 2) == [[2], [1], [3]]
        assert self.sizes(17, 3, 1, 2) == [[2, 1], [3]]
        assert self.sizes(25, 3, 1, 2) == [[2, 1, 3]]
        assert self.sizes(1 << 20, 3, 1, 2) == [[2, 1, 3]]

    def test_no_parameters_are_one_empty_bucket(self):
        assert self.sizes(8) == [[]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("sizes", [[1], [1] * 50, [1000, 1, 16, 17]])
    def test_there_is_room_for_any(self, dtype, sizes):
        parameters = [torch.zeros(size, dtype=dtype) for size in sizes]
        for n_bytes in (1, 16, 4000, 0):
            lines = sum(-(-bytes_of(bucket) // 64) * 64 for bucket in split(parameters, n_bytes))
            assert lines <= bytes_of(parameters) + room_for(parameters)


class TestLeaving:
    def test_is_while_backward_still_computes(self):
        case = Case(bucket_bytes=24)
        case.step()
        assert case.events == [
            "push 15", "below third", "push 9", "below second", "done", "push 5",
            "pull 15", "pull 9", "pull 5",
        ]  # fmt: skip

    def test_of_one_bucket_is_when_backward_is_done(self):
        case = Case(bucket_bytes=0)
        case.step()
        assert case.events[-3:] == ["done", "push 27", "pull 27"]

    def test_brings_the_gradients_and_the_loss_there_and_back(self):
        for _ in range(2):
            case = Case(bucket_bytes=24)
            grads, combined_loss, loss = case.step(weight=2.0)
            assert combined_loss == pytest.approx(loss, rel=1e-7)
            assert all(torch.equal(p.grad, g) for p, g in zip(case.net.parameters(), grads, strict=True))

    def test_is_in_the_same_order_if_a_later_bucket_is_ready_first(self):
        case = Case(bucket_bytes=24)
        case.third.weight.requires_grad_(False)  # never ready: it has no gradient
        case.step()
        assert case.events[:3] == ["below third", "below second", "done"]
        assert case.events[3:6] == ["push 15", "push 9", "push 5"]

    def test_is_not_before_anybody_said_that_backward_follows(self):
        case = Case(bucket_bytes=24)
        case.loss().backward()
        assert case.events == ["below third", "below second"]
        assert case.exchange.finish(2.0, 0.5) == 0.5

    def test_of_rows_without_weight_brings_nothing(self):
        case = Case(bucket_bytes=24)
        _, combined_loss, _ = case.step(weight=0.0)
        assert combined_loss is None
        assert case.events.index("done") < case.events.index("push 15")

    def test_ends_with_the_exchange(self):
        case = Case(bucket_bytes=24)
        case.exchange.close()
        case.step()
        assert case.events[:3] == ["below third", "below second", "done"]


class TestWhatIsNotForeseen:
    def test_gradient_that_is_computed_again_after_it_left(self):
        def twice(loss):
            loss.backward(retain_graph=True)
            loss.backward()

        case = Case(bucket_bytes=24)
        with pytest.raises(DaskpsError, match=r"computed a gradient again .* daskps.bucket-size to 0"):
            case.step(backward=twice)

    def test_gradient_that_comes_in_parts_waits_for_the_end(self):
        def in_parts(loss):
            for parameter in (case.third.weight, case.third.weight, case.third.bias):
                torch.autograd.backward(loss, inputs=[parameter], retain_graph=True)
            case.events.clear()
            loss.backward(inputs=[*case.first.parameters(), *case.second.parameters()])

        case = Case(bucket_bytes=24)
        grads, _, _ = case.step(backward=in_parts)
        assert case.events[:4] == ["below third", "below second", "done", "push 15"]
        assert all(torch.equal(p.grad, g) for p, g in zip(case.net.parameters(), grads, strict=True))

    def test_weight_that_changes_after_gradients_left(self):
        with pytest.raises(DaskpsError, match=r"counted 2 in backward and 3 after it.*bucket-size"):
            Case(bucket_bytes=24).step(weight=2.0, weight_after=3.0)

    def test_rank_that_counted_nothing_takes_part(self):
        parts = [(np.array([2.0, 4.0]), 1.0, "mean"), (np.zeros(2), 0.0, "mean")]
        assert combined(*parts).tolist() == [2.0, 4.0]
