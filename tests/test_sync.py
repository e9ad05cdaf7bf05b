"""What ranks exchange, with the ranks as threads, against plain skorch in one process."""

import pytest
import torch
from ranks import replica_of, side_by_side, train_epoch, train_ranks
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import GradientNormClipping
from torch import nn

from daskps._sync import Alone, GradientSync, LocalSGD, capacity

N_FEATURES, N_CLASSES = 4, 3
PLAIN = {"optimizer": torch.optim.SGD, "lr": 0.1}
MOMENTUM = {**PLAIN, "optimizer__momentum": 0.9, "optimizer__weight_decay": 0.1}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01}
LBFGS = {
    "optimizer": torch.optim.LBFGS,
    "lr": 1.0,
    "optimizer__max_iter": 5,
    "optimizer__line_search_fn": "strong_wolfe",
}


class Dense(nn.Sequential):
    def __init__(self, dtype=torch.float64):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.to(dtype)


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.to(torch.float64)


class Heads(nn.Module):
    """One layer for all rows, one for batches with a marked row, one for nobody."""

    def __init__(self):
        super().__init__()
        self.body, self.some, self.none = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, X):
        marked = X[:, :1] > 90
        logits = self.body(X.clamp(max=5))
        return logits + marked * self.some(X.clamp(max=5)) if marked.any() else logits


class Counting(nn.Module):
    """Buffers of all kinds, some of which a forward changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3, 1e-30]))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(2, 3, dtype=torch.int32).t())

    def forward(self, X):
        if self.training:
            self.mean.lerp_(X.mean(0), 0.5)
            self.replaced = 0.5 * self.replaced + 0.5 * X.mean(0)
            self.rows += len(X)
            self.seen[len(X) % 3] = True
            self.turned[0, 1] += len(X)
        return self.layer(X)


class Clipping(NeuralNetClassifier):
    def on_grad_computed(self, net, named_parameters, **kwargs):
        nn.utils.clip_grad_norm_([parameter for _, parameter in named_parameters], 0.05)


def net_for(module=Dense, kind=NeuralNetClassifier, **options):
    torch.manual_seed(0)
    options = {**MOMENTUM, **options} if "optimizer" not in options else options
    criterion = {"criterion": nn.CrossEntropyLoss, "train_split": None}
    return kind(module, **{**criterion, **options}).initialize()


def batch_of(n_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n_rows, N_FEATURES, generator=generator, dtype=torch.float64)
    return X, torch.randint(N_CLASSES, (n_rows,), generator=generator)


def cut(batch, sizes):
    """A batch in pieces, one for each rank; None for a rank without rows."""
    X, y = batch
    return [(Xi, yi) if len(yi) else None for Xi, yi in zip(X.split(sizes), y.split(sizes), strict=True)]


def by_rank(batches, sizes):
    """For each rank its piece of every batch."""
    return list(
        zip(*(cut(batch, sizes_) for batch, sizes_ in zip(batches, sizes, strict=True)), strict=True)
    )


def serial(net, batches, epochs=1):
    """Plain skorch on whole batches, and its losses of the last epoch."""
    plain = clone(net).initialize()
    plain.module_.load_state_dict(net.module_.state_dict())
    for parameter, like in zip(plain.module_.parameters(), net.module_.parameters(), strict=True):
        parameter.requires_grad_(like.requires_grad)
    for _ in range(epochs):
        plain.losses_ = [plain.train_step(batch)["loss"].item() for batch in batches]
    return plain


def values(net):
    return [*net.module_.parameters(), *net.module_.buffers()]


def distance(net, other):
    pairs = zip(values(net), values(other), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.is_floating_point())


def bits(tensors):
    flat = [tensor.detach().contiguous().reshape(-1) for tensor in tensors]
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in flat]


def assert_ranks_are_equal(replicas):
    for replica in replicas[1:]:
        assert bits(values(replica)) == bits(values(replicas[0]))


@pytest.fixture(autouse=True, params=[0, 1], ids=["whole", "buckets"])
def bucket_bytes(request, monkeypatch):
    """Every exchange of gradients in one piece, and again in a bucket for every parameter."""
    monkeypatch.setattr(GradientSync.__init__, "__defaults__", (request.param,))
    return request.param


def batch_mode(replica, channel, rank):
    return GradientSync(replica, channel, rank)


def local(every=None):
    return lambda replica, channel, rank: LocalSGD(replica, channel, rank, every)


BATCHES = [batch_of(n, seed=n) for n in (12, 12, 9, 2)]
TWO = by_rank(BATCHES, [(8, 4), (2, 10), (6, 3), (2, 0)])
THREE = by_rank(BATCHES, [(5, 4, 3), (8, 2, 2), (3, 3, 3), (2, 0, 0)])


class TestAlone:
    def test_exchanges_nothing(self):
        net = net_for()
        replica = replica_of(net)
        losses, uniform = train_epoch(replica, Alone(replica), BATCHES)
        plain = serial(net, BATCHES)
        assert bits(values(replica)) == bits(values(plain))
        assert losses == plain.losses_
        assert uniform


class TestGradientSync:
    @pytest.mark.parametrize("options", [PLAIN, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
    @pytest.mark.parametrize("pieces", [TWO, THREE], ids=["2 ranks", "3 ranks"])
    def test_is_a_step_on_the_union(self, options, pieces):
        net = net_for(**options)
        replicas = train_ranks(net, batch_mode, pieces, epochs=3)
        plain = serial(net, BATCHES, epochs=3)
        assert distance(replicas[0], plain) <= 1e-12
        assert distance(plain, net) > 1e-2
        assert_ranks_are_equal(replicas)

    def test_all_ranks_see_the_loss_of_the_batch(self):
        net = net_for()
        plain = serial(net, BATCHES)
        for replica in train_ranks(net, batch_mode, THREE):
            assert replica.losses_ == pytest.approx(plain.losses_, rel=1e-12)
            assert replica.uniform_

    @pytest.mark.parametrize("criterion", [
        {"criterion__weight": torch.tensor([1.0, 1.0, 10.0], dtype=torch.float64)},
        {"criterion__reduction": "sum"},
        {"criterion__label_smoothing": 0.2},
        {"criterion__ignore_index": 0},
    ], ids=["class weights", "sum", "smoothing", "ignored"])  # fmt: skip
    def test_unequal_pieces_of_other_losses_are_exact(self, criterion):
        net = net_for(**PLAIN, **criterion)
        replicas = train_ranks(net, batch_mode, by_rank([batch_of(70)], [(64, 6)]))
        plain = serial(net, [batch_of(70)])
        assert distance(replicas[0], plain) <= 1e-12
        assert replicas[1].losses_ == pytest.approx(plain.losses_)

    @pytest.mark.parametrize("n_copies", [1, 2, 4])
    def test_copies_of_the_rows_on_more_ranks_change_nothing(self, n_copies):
        net = net_for(**PLAIN)
        batch = batch_of(40)
        replicas = train_ranks(net, batch_mode, [[batch] for _ in range(n_copies)], epochs=5)
        assert distance(replicas[0], serial(net, [batch], epochs=5)) <= 1e-12

    def test_float32_agrees_to_rounding(self):
        net = net_for(module__dtype=torch.float32)
        batches = [(X.float(), y) for X, y in BATCHES]
        pieces = by_rank(batches, [(8, 4), (2, 10), (6, 3), (2, 0)])
        replicas = train_ranks(net, batch_mode, pieces)
        assert 0 < distance(replicas[0], serial(net, batches)) <= 1e-6
        assert_ranks_are_equal(replicas)

    def test_one_round_for_every_step_and_bucket_and_none_for_absent_buffers(self, bucket_bytes):
        n_rounds = 4 * len(net_for().module_.state_dict()) if bucket_bytes else 4
        replicas = train_ranks(net_for(), batch_mode, TWO)
        assert [replica.n_rounds_ for replica in replicas] == [n_rounds, n_rounds]


class TestSampleWeights:
    WEIGHTS = torch.linspace(0, 3, 12, dtype=torch.float64)

    def train(self, net, make_sync, sizes):
        X, y = batch_of(12)
        pieces = [
            [(Xi, (yi, wi))] if len(yi) else [None]
            for Xi, yi, wi in zip(*(part.split(sizes) for part in (X, y, self.WEIGHTS)), strict=True)
        ]

        def weighted(replica, channel, rank):
            replica.weighted_ = True
            return make_sync(replica, channel, rank)

        return train_ranks(net, weighted, pieces)

    def expected(self, net, class_weight=None):
        """A step of plain SGD on the weighted loss of all rows, by hand."""
        X, y = batch_of(12)
        plain = clone(net).initialize()
        plain.module_.load_state_dict(net.module_.state_dict())
        losses = nn.functional.cross_entropy(plain.module_(X), y, class_weight, reduction="none")
        shares = self.WEIGHTS if class_weight is None else self.WEIGHTS * class_weight[y]
        plain.loss_ = (losses * self.WEIGHTS).sum() / shares.sum()
        plain.loss_.backward()
        with torch.no_grad():
            for parameter in plain.module_.parameters():
                parameter.sub_(0.1 * parameter.grad)
        return plain

    @pytest.mark.parametrize("make_sync", [batch_mode, local(1)], ids=["batch", "local"])
    @pytest.mark.parametrize("sizes", [(8, 4), (1, 11), (5, 4, 3), (12, 0)])
    def test_unequal_pieces_make_the_step_of_all_rows(self, make_sync, sizes):
        net = net_for(**PLAIN)
        replicas = self.train(net, make_sync, sizes)
        plain = self.expected(net)
        assert distance(replicas[0], plain) <= 1e-12
        assert_ranks_are_equal(replicas)

    def test_multiply_class_weights(self):
        class_weight = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
        net = net_for(**PLAIN, criterion__weight=class_weight)
        replicas = self.train(net, batch_mode, (8, 4))
        plain = self.expected(net, class_weight)
        assert distance(replicas[0], plain) <= 1e-12
        assert replicas[1].losses_ == pytest.approx([plain.loss_.item()])


class TestStepWithoutWeight:
    """Rows that do not count make no step: no momentum, no weight decay, and no NaN."""

    def ignored(self, n_rows=6):
        X, y = batch_of(n_rows)
        return X, torch.full_like(y, -100)

    def test_alone(self):
        net = net_for()
        first, second = replica_of(net), replica_of(net)
        train_epoch(first, Alone(first), [BATCHES[0], self.ignored(), BATCHES[1]])
        train_epoch(second, Alone(second), [BATCHES[0], BATCHES[1]])
        assert bits(values(first)) == bits(values(second))

    @pytest.mark.parametrize("sizes", [(3, 3), (6, 0)])
    def test_on_all_ranks_in_batch_mode(self, sizes):
        net = net_for()
        batches = [BATCHES[0], self.ignored(), BATCHES[1]]
        replicas = train_ranks(net, batch_mode, by_rank(batches, [(8, 4), sizes, (2, 10)]))
        plain = serial(net, [BATCHES[0], BATCHES[1]])
        assert distance(replicas[0], plain) <= 1e-12
        assert_ranks_are_equal(replicas)

    @pytest.mark.parametrize("make_sync", [local(), local(1)], ids=["epoch", "1"])
    def test_on_one_rank_of_local_steps(self, make_sync):
        net = net_for()
        shards = [[BATCHES[0], self.ignored()], [BATCHES[1], self.ignored()]]
        replicas = train_ranks(net, make_sync, shards)
        short = train_ranks(net, make_sync, [[BATCHES[0]], [BATCHES[1]]])
        assert distance(replicas[0], short[0]) <= 1e-15
        assert_ranks_are_equal(replicas)


class TestGradientCallbacks:
    def test_see_the_combined_gradient_on_all_ranks_also_without_rows(self):
        net = net_for(callbacks=[("clip", GradientNormClipping(0.05))], **PLAIN)
        replicas = train_ranks(net, batch_mode, THREE)
        assert distance(replicas[0], serial(net, BATCHES)) <= 1e-12
        assert distance(replicas[0], serial(net_for(**PLAIN), BATCHES)) > 1e-3
        assert_ranks_are_equal(replicas)

    def test_in_the_users_own_net_run_on_all_ranks_also_without_rows(self):
        net = net_for(kind=Clipping, **PLAIN)
        replicas = train_ranks(net, batch_mode, THREE)
        assert distance(replicas[0], serial(net, BATCHES)) <= 1e-12
        assert_ranks_are_equal(replicas)


class TestAbsentGradients:
    def marked_batches(self):
        """In the second batch one row of the second rank uses the layer; in the first nobody does."""
        batches = [batch_of(10, seed=1), batch_of(10, seed=2)]
        batches[1][0][9, 0] = 99
        return batches

    def test_are_those_of_one_process(self):
        net, batches = net_for(Heads), self.marked_batches()
        replicas = train_ranks(net, batch_mode, by_rank(batches, [(7, 3), (7, 3)]), epochs=3)
        plain = serial(net, batches, epochs=3)
        assert distance(replicas[0], plain) <= 1e-12
        assert_ranks_are_equal(replicas)
        assert replicas[0].module_.some.weight.sub(net.module_.some.weight).abs().max() > 1e-3

    def test_layer_that_nobody_uses_is_bitwise_unchanged(self):
        net, batches = net_for(Heads), self.marked_batches()
        for replica in train_ranks(net, batch_mode, by_rank(batches, [(7, 3), (7, 3)]), epochs=3):
            unused = list(replica.module_.none.parameters())
            assert bits(unused) == bits(net.module_.none.parameters())
            assert [parameter.grad for parameter in unused] == [None, None]

    def test_stay_none_where_no_rank_has_one(self):
        net, batches = net_for(Heads), self.marked_batches()
        for replica in train_ranks(net, batch_mode, by_rank(batches[:1], [(7, 3)])):
            assert replica.module_.some.weight.grad is None
            assert bits(replica.module_.some.parameters()) == bits(net.module_.some.parameters())

    def test_one_ranks_gradient_is_weighted_by_its_rows(self):
        net, batches = net_for(Heads, **PLAIN), self.marked_batches()
        replicas = train_ranks(net, batch_mode, by_rank(batches[1:], [(7, 3)]))
        alone = serial(net, [cut(batches[1], (7, 3))[1]]).module_.some.weight.grad
        for replica in replicas:
            assert (replica.module_.some.weight.grad - 0.3 * alone).abs().max() <= 1e-15

    def test_frozen_parameters_are_left_alone(self):
        net = net_for()
        net.module_[0].requires_grad_(False)

        def frozen(replica, channel, rank):
            replica.module_[0].requires_grad_(False)
            return GradientSync(replica, channel, rank)

        replicas = train_ranks(net, frozen, TWO)
        assert bits(replicas[0].module_[0].parameters()) == bits(net.module_[0].parameters())
        assert distance(replicas[0], serial(net, BATCHES)) <= 1e-12

    @pytest.mark.parametrize("make_sync", [batch_mode, local(1)], ids=["batch", "local"])
    def test_parameters_that_learn_from_a_later_epoch_on_are_exchanged(self, make_sync):
        net = net_for(**PLAIN)
        plain = serial(net, BATCHES[:1])

        def thawed(replica, channel, rank):
            replica.module_[0].requires_grad_(False)
            sync = make_sync(replica, channel, rank)
            replica.module_[0].requires_grad_(True)
            return sync

        replicas = train_ranks(net, thawed, by_rank(BATCHES[:1], [(8, 4)]))
        assert_ranks_are_equal(replicas)
        assert distance(replicas[0], plain) <= 1e-12


class TestKindsOfParameters:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_change_as_in_one_process_and_keep_their_kind(self, dtype):
        torch.manual_seed(0)

        class Kinds(nn.Module):
            def __init__(self):
                super().__init__()
                self.turned = nn.Parameter(torch.randn(3, 4).t().mul(0.1))
                self.scale = nn.Parameter(torch.tensor(1.0))
                self.bias = nn.Parameter(torch.zeros(3, dtype=dtype))
                self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

            def forward(self, X):
                self.calls += 1
                return X.float() @ self.turned * self.scale + self.bias.float() * self.frozen

        net = net_for(Kinds, **PLAIN)
        batch = batch_of(12)
        X = batch[0].float()
        replicas = train_ranks(net, batch_mode, by_rank([(X, batch[1])], [(8, 4)]))
        plain = serial(net, [(X, batch[1])])
        assert_ranks_are_equal(replicas)
        tolerance = 1e-3 if dtype is torch.bfloat16 else 1e-6
        assert distance(replicas[0], plain) <= tolerance
        for ours, theirs in zip(values(replicas[0]), values(plain), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert (ours.stride(), ours.requires_grad) == (theirs.stride(), theirs.requires_grad)
        assert replicas[0].module_.frozen.tolist() == [1.0, 1.0, 1.0]
        assert replicas[0].module_.bias.abs().max() > 1e-5

    def test_sparse_gradients_add_up(self):
        class Embedded(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)

            def forward(self, X):
                return self.table(X).sum(1)

        net = net_for(Embedded, **PLAIN)
        batch = (torch.arange(20).reshape(10, 2) % 10, batch_of(10)[1])
        replicas = train_ranks(net, batch_mode, by_rank([batch] * 2, [(7, 3), (10, 0)]))
        assert distance(replicas[0], serial(net, [batch] * 2)) <= 1e-12
        assert_ranks_are_equal(replicas)


class TestBuffers:
    def test_batch_norm_is_averaged_by_rows_and_its_count_is_rank_0s(self):
        net = net_for(Normalised, **PLAIN)
        replicas = train_ranks(net, batch_mode, by_rank([batch_of(12)], [(8, 4)]))
        alone = [serial(net, [piece]) for piece in cut(batch_of(12), (8, 4))]
        for name in ("running_mean", "running_var"):
            first, second = (getattr(one.module_[1], name) for one in alone)
            for replica in replicas:
                averaged = getattr(replica.module_[1], name)
                assert (averaged - (8 * first + 4 * second) / 12).abs().max() <= 1e-15
        assert_ranks_are_equal(replicas)
        assert replicas[1].module_[1].num_batches_tracked == 1

    @pytest.mark.parametrize("make_sync", [batch_mode, local(), local(2)])
    def test_floats_are_averaged_and_all_others_are_rank_0s(self, make_sync):
        net = net_for(Counting, **PLAIN)
        pieces = [(8, 4), (2, 10), (6, 3)]
        replicas = train_ranks(net, make_sync, by_rank(BATCHES[:3], pieces))
        assert_ranks_are_equal(replicas)
        module = replicas[1].module_
        assert module.rows == 16
        assert module.seen.tolist() == [True, False, True]
        assert module.turned.tolist() == [[0, 16], [0, 0], [0, 0]]
        assert module.mean.abs().max() > 0
        assert module.mean.tolist() == pytest.approx(module.replaced.tolist())

    @pytest.mark.parametrize("make_sync", [batch_mode, local(), local(1)])
    def test_constants_keep_their_bits(self, make_sync):
        net = net_for(Counting, **PLAIN)
        for replica in train_ranks(net, make_sync, THREE, epochs=3):
            assert bits([replica.module_.constant]) == bits([net.module_.constant])

    def test_criterions_buffers_are_averaged(self):
        class Tracking(nn.CrossEntropyLoss):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

            def forward(self, y_pred, y_true):
                loss = super().forward(y_pred, y_true)
                self.mean.copy_(loss.detach())
                return loss

        net = net_for(criterion=Tracking, **PLAIN)
        pieces = by_rank([batch_of(12)], [(8, 4)])
        first, second = train_ranks(net, batch_mode, pieces)
        expected = serial(net, [batch_of(12)]).criterion_.mean.item()
        assert first.criterion_.mean == second.criterion_.mean == pytest.approx(expected)


def averaged(replicas, weights):
    """Parameters averaged by hand."""
    total = sum(weights)
    columns = zip(*(replica.module_.parameters() for replica in replicas), strict=True)
    return [sum(w * p.detach() for w, p in zip(weights, column, strict=True)) / total for column in columns]


def assert_parameters(replica, expected, tolerance=1e-12):
    for parameter, value in zip(replica.module_.parameters(), expected, strict=True):
        assert (parameter - value).abs().max() <= tolerance


SHARDS = [
    [batch_of(8, 1), batch_of(8, 2), batch_of(5, 3)],
    [batch_of(4, 4), batch_of(3, 5), batch_of(3, 6)],
]


class TestLocalSGD:
    @pytest.mark.parametrize("options", [PLAIN, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
    def test_epoch_is_the_row_weighted_average_of_independent_runs(self, options):
        net = net_for(**options)
        replicas = train_ranks(net, local(), SHARDS)
        alone = [serial(net, shard) for shard in SHARDS]
        assert_parameters(replicas[0], averaged(alone, [21, 10]))
        assert_ranks_are_equal(replicas)
        assert all(replica.uniform_ for replica in replicas)
        assert [r.losses_ for r in replicas] == [one.losses_ for one in alone]

    def test_step_of_plain_sgd_is_one_on_the_union(self):
        net = net_for(**PLAIN)
        replicas = train_ranks(net, local(1), by_rank(BATCHES[:3], [(8, 4), (2, 10), (6, 3)]))
        assert distance(replicas[0], serial(net, BATCHES[:3])) <= 1e-12

    def test_step_of_plain_sgd_is_one_on_the_union_with_class_weights(self):
        weight = torch.tensor([1.0, 1.0, 10.0], dtype=torch.float64)
        net = net_for(**PLAIN, criterion__weight=weight)
        replicas = train_ranks(net, local(), by_rank([batch_of(70)], [(64, 6)]))
        assert distance(replicas[0], serial(net, [batch_of(70)])) <= 1e-12

    def test_every_two_steps_averages_by_the_rows_since_the_last_round(self):
        net = net_for(**PLAIN)
        replicas = train_ranks(net, local(2), SHARDS)
        alone = [serial(net, shard[:2]) for shard in SHARDS]
        middle = averaged(alone, [16, 7])
        for one, shard in zip(alone, SHARDS, strict=True):
            one.module_.load_state_dict(dict(zip(one.module_.state_dict(), middle, strict=True)))
            one.train_step(shard[2])
        assert_parameters(replicas[1], averaged(alone, [5, 3]))

    @pytest.mark.parametrize(("every", "n_steps", "expected"), [
        (None, 3, 1), (1, 3, 3), (2, 3, 2), (2, 4, 2), (3, 3, 1), (100, 3, 1),
    ])  # fmt: skip
    def test_rounds_are_counted_from_the_start_of_the_epoch_and_end_it(self, every, n_steps, expected):
        shards = [[batch_of(4, step) for step in range(n_steps)] for _ in range(2)]
        replicas = train_ranks(net_for(**PLAIN), local(every), shards, epochs=2)
        of_optimizer_state = 1
        assert [r.n_rounds_ for r in replicas] == [2 * (expected + of_optimizer_state)] * 2

    @pytest.mark.parametrize("n_copies", [1, 2, 4])
    def test_copies_of_the_rows_on_more_ranks_change_nothing(self, n_copies):
        net = net_for()
        shard = [batch_of(20, 1), batch_of(20, 2)]
        replicas = train_ranks(net, local(), [shard] * n_copies, epochs=5)
        assert distance(replicas[0], serial(net, shard, epochs=5)) <= 1e-12

    def test_what_no_rank_touches_keeps_its_bits(self):
        net = net_for(Heads)
        replicas = train_ranks(net, local(1), THREE, epochs=3)
        for replica in replicas:
            assert bits(replica.module_.none.parameters()) == bits(net.module_.none.parameters())

    def test_rank_without_rows_follows_the_others(self):
        net = net_for(**PLAIN)
        replicas = train_ranks(net, local(1), [BATCHES[:2], [None, None]])
        assert distance(replicas[0], serial(net, BATCHES[:2])) <= 1e-12
        assert_ranks_are_equal(replicas)

    def test_rank_whose_rows_do_not_count_is_left_out(self):
        net = net_for(**PLAIN)
        X, y = batch_of(5)
        ignored = (X, torch.full_like(y, -100))
        replicas = train_ranks(net, local(), [BATCHES[:1], [ignored]])
        assert distance(replicas[0], serial(net, BATCHES[:1])) <= 1e-12
        assert_ranks_are_equal(replicas)


def optimizer_state(net):
    return [net.optimizer_.state[p] for p in net.module_.parameters()]


class TestOptimizerState:
    @pytest.mark.parametrize(("options", "keys"), [
        (MOMENTUM, ["momentum_buffer"]),
        (ADAM, ["step", "exp_avg", "exp_avg_sq"]),
        ({**ADAM, "optimizer__amsgrad": True}, ["max_exp_avg_sq"]),
    ], ids=["momentum", "adam", "amsgrad"])  # fmt: skip
    def test_is_averaged_by_rows(self, options, keys):
        net = net_for(**options)
        replicas = train_ranks(net, local(), SHARDS)
        alone = [optimizer_state(serial(net, shard)) for shard in SHARDS]
        for replica in replicas:
            for state, first, second in zip(optimizer_state(replica), *alone, strict=True):
                for key in keys:
                    expected = (21 * first[key] + 10 * second[key]) / 31
                    assert (state[key] - expected).abs().max() <= 1e-12
                    assert state[key].dtype == first[key].dtype

    def test_makes_the_next_epoch_start_from_one_state(self):
        net = net_for()
        replicas = train_ranks(net, local(), SHARDS, epochs=3)
        states = [[s["momentum_buffer"] for s in optimizer_state(r)] for r in replicas]
        assert bits(states[0]) == bits(states[1])
        assert all(replica.uniform_ for replica in replicas)

    @pytest.mark.parametrize("options", [MOMENTUM, ADAM], ids=["momentum", "adam"])
    @pytest.mark.parametrize("marked", [0, 1])
    def test_of_a_parameter_that_one_rank_alone_has_used(self, options, marked):
        """It counts as zero on the other rank, and both hold the average and can go on."""
        net = net_for(Heads, **options)
        shards = [[batch_of(6, 1)], [batch_of(4, 2)]]
        shards[marked][0][0][0, 0] = 99
        replicas = train_ranks(net, local(), shards, epochs=2)
        states = [r.optimizer_.state[r.module_.some.weight] for r in replicas]
        assert set(states[0]) == set(states[1])
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key])
        assert_ranks_are_equal(replicas)
        assert not replicas[0].optimizer_.state.get(replicas[0].module_.none.weight)

    @pytest.mark.parametrize("options", [MOMENTUM, ADAM], ids=["momentum", "adam"])
    @pytest.mark.parametrize("idle", [0, 1])
    def test_that_a_rank_without_rows_lacks_is_reported_as_not_shared(self, options, idle):
        net = net_for(**options)
        shards = [SHARDS[0], [None] * 3] if idle else [[None] * 3, SHARDS[0]]
        replicas = train_ranks(net, local(), shards)
        plain = serial(net, SHARDS[0])
        assert_parameters(replicas[idle], plain.module_.parameters())
        assert [replica.uniform_ for replica in replicas] == [idle == 1, idle == 0]
        states = optimizer_state(replicas[1 - idle]), optimizer_state(plain)
        for state, expected in zip(*states, strict=True):
            assert all((state[key] - expected[key]).abs().max() <= 1e-12 for key in expected)

    def test_of_plain_sgd_is_none_and_shared(self):
        net = net_for(**PLAIN)
        assert all(replica.uniform_ for replica in train_ranks(net, local(), SHARDS))

    def test_of_equal_steps_stays_a_whole_number_of_steps(self):
        net = net_for(**ADAM)
        replicas = train_ranks(net, local(), [[batch_of(7, 1)] * 3, [batch_of(3, 2)] * 3], epochs=3)
        assert {state["step"].item() for r in replicas for state in optimizer_state(r)} == {9.0}

    def test_of_another_kind_is_reported_as_not_shared(self):
        net = net_for(**LBFGS)
        for replica in train_ranks(net, local(), SHARDS):
            assert not replica.uniform_


class TestCapacity:
    """What ranks agree on when they join: how much one round may carry."""

    @pytest.mark.parametrize("module", [Dense, Normalised, Heads, Counting])
    @pytest.mark.parametrize(("make_sync", "n_meetings"), [(batch_mode, 4), (local(1), 4), (local(), 1)])
    def test_is_enough_for_gradients_and_averages_to_take_one_round_each(
        self, module, make_sync, n_meetings, bucket_bytes
    ):
        net = net_for(module, **PLAIN)
        if bucket_bytes and make_sync is batch_mode:
            n_meetings *= len(list(net.module_.parameters()))
        buffers = list(net.module_.buffers())
        of_buffers = any(b.is_floating_point() for b in buffers) and make_sync is batch_mode
        of_integers = any(not b.is_floating_point() for b in buffers)
        of_optimizer_state = make_sync is not batch_mode
        expected = n_meetings + of_buffers + of_integers + of_optimizer_state
        replicas = train_ranks(net, make_sync, [BATCHES, BATCHES])
        assert [replica.n_rounds_ for replica in replicas] == [expected] * 2

    @pytest.mark.parametrize("idle", [False, True])
    def test_is_no_bound_for_optimizer_state_which_takes_several_rounds(self, idle):
        """Also of a rank that has none, and so does not know how many."""
        net = net_for(**ADAM)
        n_bytes = -(-capacity(net) // 64) * 64
        n_slots = 3 * len(list(net.module_.parameters()))
        size = 2 * sum(p.numel() for p in net.module_.parameters()) + n_slots // 3 + n_slots + 1
        n_rounds = -(-8 * size // n_bytes)
        assert n_rounds > 1
        replicas = train_ranks(net, local(), [SHARDS[0], [None] * 3 if idle else SHARDS[1]], epochs=2)
        per_epoch = 1 + 1 + n_rounds  # of parameters, of the number of bytes, of state
        assert [replica.n_rounds_ for replica in replicas] == [2 * per_epoch] * 2


class TestLBFGS:
    @pytest.mark.parametrize("search", [None, "strong_wolfe"])
    @pytest.mark.parametrize("pieces", [TWO, THREE], ids=["2 ranks", "3 ranks"])
    def test_in_lockstep_is_that_of_one_process(self, pieces, search):
        options = {**LBFGS, "optimizer__line_search_fn": search, "lr": 1.0 if search else 0.1}
        net = net_for(**options)
        replicas = train_ranks(net, batch_mode, pieces, epochs=2)
        plain = serial(net, BATCHES, epochs=2)
        assert distance(replicas[0], plain) <= 1e-8
        assert distance(plain, net) > 0.1
        assert replicas[1].losses_ == pytest.approx(plain.losses_, rel=1e-8)
        assert_ranks_are_equal(replicas)
        evaluations = [r.optimizer_.state[r.module_[0].weight]["func_evals"] for r in replicas]
        assert set(evaluations) == {plain.optimizer_.state[plain.module_[0].weight]["func_evals"]}


def test_rows_count_once_however_often_the_optimizer_looks_at_them_in_a_step():
    net = net_for(**PLAIN)

    def rank_does(rank, channel):
        replica = replica_of(net)
        sync = LocalSGD(replica, channel, rank, every=None)
        sync.epoch_began()
        for _ in range(1 + 4 * rank):
            sync.gradients(weight=[6.0, 30.0][rank], loss=0.0)
        with torch.no_grad():
            replica.module_[0].bias.add_(36.0 * rank)
        sync.stepped(0)
        sync.epoch_ended()
        return replica.module_[0].bias - net.module_[0].bias

    for change in side_by_side(2, rank_does):
        assert change.tolist() == pytest.approx([30.0] * 8)


class TestFailure:
    def test_of_one_rank_reaches_the_others(self):
        X, y = batch_of(4)
        with pytest.raises(IndexError, match="out of bounds"):
            train_ranks(net_for(), batch_mode, [[(X, y)], [(X, y + 7)]])
