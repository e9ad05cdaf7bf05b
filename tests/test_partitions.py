import itertools
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from daskps import _loading
from daskps._partitions import (
    Batching,
    Cut,
    Layout,
    Plan,
    contiguous,
    cut_blocks,
    deal,
    deal_batches,
    deal_validation,
    epoch_order,
    local_steps,
    pieces,
    plan_batches,
    plan_local,
    serial_order,
    spread,
    step_rows,
)

ROWS = [1, 2, 3, 5, 16, 33, 47, 802, 1003]
BATCH_SIZES = [-1, 1, 2, 3, 7, 16, 32, 2000]
WORLDS = [1, 2, 3, 4, 7]
over_batchings = pytest.mark.parametrize(
    ("batch_size", "drop_last"), list(itertools.product(BATCH_SIZES, [False, True]))
)
over_worlds = pytest.mark.parametrize("world_size", WORLDS)


def serial_batches(n_rows, batch_size, drop_last):
    """What a serial DataLoader yields, row numbers in place of rows."""
    size = n_rows if batch_size == -1 else batch_size
    return list(BatchSampler(SequentialSampler(range(n_rows)), size, drop_last))


def rank_pieces(plan):
    return [pieces(rows, sizes) for rows, sizes in zip(plan.rows, plan.sizes, strict=True)]


def feasible_rows(batching):
    return [n_rows for n_rows in ROWS if len(batching.sizes(n_rows))]


def used_rows(plan):
    return np.sort(np.concatenate(plan.rows)).tolist()


class TestBatching:
    @over_batchings
    def test_sizes_are_those_of_the_serial_batches(self, batch_size, drop_last):
        for n_rows in ROWS:
            serial = [len(batch) for batch in serial_batches(n_rows, batch_size, drop_last)]
            assert Batching(batch_size, drop_last=drop_last).sizes(n_rows).tolist() == serial

    @pytest.mark.parametrize("batch_size", [-1, 1, 16, 50])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_sizes_are_those_of_skorchs_iterator(self, batch_size, drop_last):
        net = NeuralNetClassifier(
            nn.Linear,
            module__in_features=1,
            module__out_features=2,
            batch_size=batch_size,
            iterator_train__drop_last=drop_last,
        ).initialize()
        loader = net.get_iterator(net.get_dataset(np.arange(33), np.zeros(33)), training=True)
        serial = [len(X) for X, _ in loader]
        assert _loading.batching(net, True).sizes(33).tolist() == serial

    @pytest.mark.parametrize("batch_size", [-1, 16])
    def test_no_rows_make_no_batch(self, batch_size):
        assert Batching(batch_size).sizes(0).tolist() == []


class TestPlanBatches:
    @over_batchings
    @over_worlds
    def test_pieces_of_a_step_are_the_serial_batch(self, batch_size, world_size, drop_last):
        for n_rows in ROWS:
            plan = plan_batches(n_rows, Batching(batch_size, drop_last=drop_last), world_size, 0)
            steps = zip(*rank_pieces(plan), strict=True)
            assert [np.concatenate(parts).tolist() for parts in steps] == serial_batches(
                n_rows, batch_size, drop_last
            )

    @over_batchings
    @over_worlds
    def test_nobody_gets_a_single_row_unless_the_batch_is_one(self, batch_size, world_size, drop_last):
        for n_rows in ROWS:
            plan = plan_batches(n_rows, Batching(batch_size, drop_last=drop_last), world_size, 0)
            single = (plan.sizes == 1).any(axis=0)
            assert (plan.sizes.sum(axis=0)[single] == 1).all()

    @over_batchings
    @over_worlds
    def test_rank_0_has_rows_in_every_step_and_no_fewer_than_others(
        self, batch_size, world_size, drop_last
    ):
        for n_rows in ROWS:
            plan = plan_batches(n_rows, Batching(batch_size, drop_last=drop_last), world_size, 0)
            assert (plan.sizes[0] > 0).all()
            assert (plan.sizes[0] == plan.sizes.max(axis=0, initial=0)).all()

    @over_worlds
    def test_shuffled_plan_uses_every_row_once(self, world_size):
        plan = plan_batches(802, Batching(32, shuffle=True), world_size, seed=5)
        assert used_rows(plan) == list(range(802))

    def test_shuffled_plan_repeats_itself_for_a_seed_only(self):
        first, again, other = (plan_batches(100, Batching(10, shuffle=True), 2, seed) for seed in (1, 1, 2))
        assert np.array_equal(first.rows[0], again.rows[0])
        assert not np.array_equal(first.rows[0], other.rows[0])

    def test_shuffled_drop_last_drops_as_many_rows_as_serially(self):
        plan = plan_batches(103, Batching(10, shuffle=True, drop_last=True), 3, seed=0)
        assert len(set(used_rows(plan))) == 100

    def test_rows_are_shared_evenly(self):
        plan = plan_batches(803, Batching(32), 4, seed=0)
        full = plan.sizes[:, :-1]
        assert full.tolist() == [[8] * 25] * 4
        assert plan.sizes[:, -1].tolist() == [3, 0, 0, 0]


class TestDeal:
    @pytest.mark.parametrize(("n_rows", "world_size", "expected"), [
        (1, 3, [1, 0, 0]),
        (2, 2, [2, 0]),
        (3, 2, [3, 0]),
        (4, 2, [2, 2]),
        (5, 4, [3, 2, 0, 0]),
        (32, 3, [11, 11, 10]),
    ])  # fmt: skip
    def test_at_least_two_rows_each_rank_0_first(self, n_rows, world_size, expected):
        assert deal(n_rows, world_size).tolist() == expected

    def test_no_batches_make_no_steps(self):
        assert deal_batches(np.array([], dtype=int), 3).shape == (3, 0)


class TestPlanLocal:
    @over_batchings
    @over_worlds
    def test_every_row_that_serial_uses_is_used_once(self, batch_size, world_size, drop_last):
        batching = Batching(batch_size, drop_last=drop_last)
        for n_rows in feasible_rows(batching):
            plan = plan_local(n_rows, batching, world_size, seed=0)
            assert used_rows(plan) == list(range(batching.sizes(n_rows).sum()))
            assert plan.sizes.sum(axis=1).tolist() == [len(rows) for rows in plan.rows]

    @over_batchings
    def test_one_rank_makes_the_serial_steps(self, batch_size, drop_last):
        batching = Batching(batch_size, drop_last=drop_last)
        for n_rows in feasible_rows(batching):
            plan = plan_local(n_rows, batching, 1, seed=0)
            steps = [piece.tolist() for piece in rank_pieces(plan)[0]]
            assert steps == serial_batches(n_rows, batch_size, drop_last)

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    @pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16])
    def test_all_ranks_get_their_share_however_small_the_batches(self, batch_size, world_size):
        plan = plan_local(96, Batching(batch_size), world_size, seed=0)
        assert [len(rows) for rows in plan.rows] == [96 // world_size] * world_size

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_steps_of_one_row_stay_steps_of_one_row(self, world_size):
        plan = plan_local(96, Batching(1), world_size, seed=0)
        assert (plan.sizes == 1).all()

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_ranks_steps_together_walk_through_the_rows_in_serial_order(self, world_size):
        n_rows = 16 * world_size * 5
        plan = plan_local(n_rows, Batching(16), world_size, seed=0)
        assert (plan.sizes == 16).all()
        for step, parts in enumerate(zip(*rank_pieces(plan), strict=True)):
            start = 16 * world_size * step
            together = np.sort(np.concatenate(parts)).tolist()
            assert together == list(range(start, start + 16 * world_size))


class TestLocalSteps:
    @pytest.mark.parametrize(("lengths", "batch_size", "expected"), [
        ([64, 64], 32, [[32, 32], [32, 32]]),
        ([40, 37], 16, [[16, 16, 8], [16, 16, 5]]),
        ([33, 32], 16, [[11, 11, 11], [11, 11, 10]]),
        ([33, 17], 16, [[11, 11, 11], [6, 6, 5]]),
        ([50, 50], -1, [[50], [50]]),
        ([50, 30], -1, [[50], [30]]),
        ([34, 3], 16, [[16, 16, 2], [3, 0, 0]]),
    ])  # fmt: skip
    def test_cut_serially_where_that_fits_else_evenly(self, lengths, batch_size, expected):
        assert local_steps(lengths, batch_size).tolist() == expected

    @pytest.mark.parametrize("lengths", [[100, 37, 5], [40, 39, 2], [17, 17], [65, 64, 33, 1]])
    @pytest.mark.parametrize("batch_size", [2, 4, 16, 64])
    def test_no_step_of_one_row_and_as_many_steps_as_the_longest_shard_needs(self, lengths, batch_size):
        sizes = local_steps(lengths, batch_size)
        assert sizes.shape == (len(lengths), ceil(max(lengths) / batch_size))
        assert sizes.sum(axis=1).tolist() == lengths
        assert not (sizes[np.array(lengths) > 1] == 1).any()

    def test_no_step_is_larger_than_the_batch(self):
        for a, b in itertools.product(range(2, 70), repeat=2):
            assert local_steps([a, b], 16).max() <= 17

    def test_empty_shard_takes_part_in_no_step(self):
        assert local_steps([20, 0], 8).tolist() == [[8, 8, 4], [0, 0, 0]]


class TestSpread:
    def test_pieces_of_a_rank_differ_by_at_most_a_row(self):
        for lengths in ([100, 37, 5], [80, 80, 80], [31, 7, 64, 2]):
            sizes = spread(lengths, 9)
            for n_rows, row in zip(lengths, sizes, strict=True):
                used = row[row > 0]
                assert row.sum() == n_rows
                assert used.max() - used.min() <= 1
                assert used.min() >= min(2, n_rows)

    @pytest.mark.parametrize("lengths", [[100, 37, 18], [33, 33, 33, 33], [50, 51], [19, 19, 20]])
    def test_steps_differ_by_at_most_a_row_if_all_ranks_are_in_all_steps(self, lengths):
        together = spread(lengths, 9).sum(axis=0)
        assert together.max() - together.min() <= 1

    def test_unequal_blocks_of_the_field_report(self):
        sizes = spread([100, 37, 5], ceil(142 / 16))
        together = sizes.sum(axis=0)
        assert sizes.shape == (3, 9)
        assert sizes.sum(axis=1).tolist() == [100, 37, 5]
        assert sorted(sizes[2][sizes[2] > 0].tolist()) == [2, 3]
        assert (sizes[:2] > 1).all()
        assert together.max() - together.min() <= 3

    def test_small_shards_do_not_all_take_the_same_steps(self):
        sizes = spread([90, 4, 4, 4, 4], 9)
        assert sizes.sum(axis=0).max() <= 12

    @pytest.mark.parametrize(("world_size", "batch_size"), [(4, 4), (4, 6), (8, 2)])
    def test_small_batches_go_to_some_ranks_in_turn(self, world_size, batch_size):
        sizes = spread([24] * world_size, 24 * world_size // batch_size)
        assert (sizes.sum(axis=0) == batch_size).all()
        assert not (sizes == 1).any()

    def test_single_row_is_used(self):
        assert spread([4, 1], 2).tolist() in ([[2, 2], [1, 0]], [[2, 2], [0, 1]])


class TestBlocks:
    @over_worlds
    @pytest.mark.parametrize("n_rows", [0, 1, 5, 100])
    def test_contiguous_blocks_are_balanced(self, n_rows, world_size):
        bounds = contiguous(n_rows, world_size)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, n_rows, world_size + 1)
        assert np.diff(bounds).max() - np.diff(bounds).min() <= 1

    @pytest.mark.parametrize("local", [False, True])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_every_row_is_used_once_by_the_rank_that_holds_it(self, world_size, local):
        numbers = np.random.default_rng(0).permutation(205)
        train, valid = np.sort(numbers[:160]), np.sort(numbers[160:])
        bounds = contiguous(205, world_size)
        cut = cut_blocks(train, valid, Batching(16), Batching(16), bounds, local)
        assert cut.world_size == world_size
        assert used_rows(cut.training) == list(range(160))
        assert sorted(np.concatenate([rows for _, rows in cut.validation])) == list(range(45))
        for rank in range(world_size):
            inside = range(bounds[rank], bounds[rank + 1])
            held = [
                *train[cut.training.rows[rank]],
                *valid[np.concatenate(cut.validation_of(rank))],
            ]
            assert all(row in inside for row in held)

    def test_batch_mode_makes_as_many_steps_as_serially(self):
        cut = cut_blocks(
            np.arange(142),
            np.arange(0),
            Batching(16),
            Batching(16),
            np.array([0, 100, 137, 142]),
            False,
        )
        assert cut.training.sizes.shape == (3, 9)
        assert [len(rows) for rows in cut.training.rows] == [100, 37, 5]
        assert cut.validation == []

    @over_batchings
    @pytest.mark.parametrize("local", [False, True])
    def test_one_rank_makes_the_serial_steps(self, local, batch_size, drop_last):
        batching = Batching(batch_size, drop_last=drop_last)
        for n_rows in feasible_rows(batching):
            rows, none = np.arange(n_rows), np.arange(0)
            cut = cut_blocks(rows, none, batching, batching, np.array([0, n_rows]), local)
            steps = [piece.tolist() for piece in rank_pieces(cut.training)[0]]
            assert steps == serial_batches(n_rows, batch_size, drop_last)

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_steps_of_one_row_stay_steps_of_one_row(self, world_size):
        one = Batching(1)
        bounds = contiguous(50, world_size)
        cut = cut_blocks(np.arange(50), np.arange(0), one, one, bounds, False)
        assert cut.training.sizes.sum(axis=0).tolist() == [1] * 50

    @pytest.mark.parametrize("batch_size", [3, 4, 7, 16])
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_no_step_is_without_rows_or_much_larger_than_a_batch(self, world_size, batch_size):
        batching = Batching(batch_size)
        for n_rows in (33, 100, 205):
            bounds = contiguous(n_rows, world_size)
            cut = cut_blocks(np.arange(n_rows), np.arange(0), batching, batching, bounds, False)
            together = cut.training.sizes.sum(axis=0)
            assert together.min() >= 1
            assert together.max() <= batch_size + 2

    def test_drop_last_drops_the_last_rows(self):
        batching = Batching(16, drop_last=True)
        cut = cut_blocks(
            np.arange(142), np.arange(0), batching, Batching(16), np.array([0, 100, 142]), False
        )
        assert used_rows(cut.training) == list(range(128))
        assert cut.training.sizes.shape == (2, 8)

    def test_block_without_training_rows_is_an_empty_rank(self):
        cut = cut_blocks(
            np.arange(40, 100), np.arange(40), Batching(10), Batching(10), contiguous(100, 3), False
        )
        assert len(cut.training.rows[0]) == 0
        assert cut.training.sizes[0].tolist() == [0] * 6
        assert used_rows(cut.training) == list(range(60))


class TestShuffling:
    def test_labels_that_go_round_are_on_all_ranks(self):
        """Dealt one by one in order, each of 4 ranks would have one of 4 classes."""
        labels = np.arange(200) % 4
        for rows in plan_local(200, Batching(10, shuffle=True), 4, seed=0).rows:
            assert np.bincount(labels[rows], minlength=4).min() >= 5

    @pytest.mark.parametrize("n_rows", [0, 1, 2, 50])
    def test_order_is_a_permutation(self, n_rows):
        order = epoch_order(3, 1, 0, n_rows, shuffle=True)
        assert sorted(order) == list(range(n_rows))

    def test_order_repeats_itself_for_the_same_seed_epoch_and_rank(self):
        assert np.array_equal(epoch_order(3, 1, 2, 50, True), epoch_order(3, 1, 2, 50, True))

    @pytest.mark.parametrize("key", [(4, 1, 2), (3, 2, 2), (3, 1, 1)])
    def test_order_differs_for_another_seed_epoch_or_rank(self, key):
        assert not np.array_equal(epoch_order(3, 1, 2, 50, True), epoch_order(*key, 50, True))

    def test_rows_in_blocks_are_shuffled_in_windows_of_blocks(self):
        bounds = np.array([0, 5, 6, 6, 13, 20, 26])
        layout = Layout(bounds, 2)
        seen = set()
        for epoch in range(20):
            order = epoch_order(3, epoch, 2, 26, True, layout)
            assert sorted(order) == list(range(26))
            blocks = np.searchsorted(bounds, order, side="right") - 1
            windows = [sorted({*blocks[rows]}) for rows in windows_of(blocks, bounds)]
            seen.add(tuple(map(tuple, windows)))
            assert sorted(block for window in windows for block in window) == [0, 1, 3, 4, 5]
        assert len(seen) > 10
        assert order.tolist() != sorted(order)

    def test_rows_of_few_blocks_are_shuffled_all_together(self):
        order = epoch_order(3, 0, 0, 20, True, Layout(np.array([0, 10, 20]), 2))
        assert 0 < np.count_nonzero(order[:10] >= 10) < 10

    def test_without_shuffling_the_order_is_kept(self):
        assert epoch_order(3, 1, 2, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]
        layout = Layout(np.array([0, 2, 5]), 1)
        assert epoch_order(3, 1, 2, 5, shuffle=False, layout=layout).tolist() == [0, 1, 2, 3, 4]
        assert serial_order(5, Batching(2), seed=1).tolist() == [0, 1, 2, 3, 4]

    def test_global_random_state_is_left_alone(self):
        np.random.seed(0)
        torch.manual_seed(0)
        before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        epoch_order(3, 1, 2, 50, True)
        serial_order(50, Batching(8, shuffle=True), seed=1)
        assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def windows_of(blocks, bounds):
    """Stretches of an order at whose ends no block has rows on both sides."""
    last = [np.flatnonzero(blocks == block).max() for block in blocks]
    ends = [row + 1 for row in range(len(blocks)) if max(last[: row + 1]) == row]
    return [range(start, end) for start, end in pairwise([0, *ends])]


class TestStepRows:
    def test_without_shuffling_they_are_the_serial_batches(self):
        plan = plan_batches(103, Batching(16), 3, seed=0)
        rows = step_rows(plan, seed=0, epoch=0, shuffle=False)
        assert [step.tolist() for step in rows] == serial_batches(103, 16, False)

    def test_they_are_what_the_ranks_load(self):
        plan = plan_batches(103, Batching(16, shuffle=True), 3, seed=7)
        by_rank = [
            pieces(rows[epoch_order(7, 4, rank, len(rows), True)], sizes)
            for rank, (rows, sizes) in enumerate(zip(plan.rows, plan.sizes, strict=True))
        ]
        for step, rows in enumerate(step_rows(plan, seed=7, epoch=4, shuffle=True)):
            assert rows.tolist() == np.concatenate([parts[step] for parts in by_rank]).tolist()

    def test_shuffled_epoch_uses_every_row_once(self):
        plan = plan_batches(103, Batching(16, shuffle=True), 3, seed=7)
        rows = np.concatenate(step_rows(plan, seed=7, epoch=4, shuffle=True))
        assert sorted(rows) == list(range(103))


class TestValidation:
    @over_worlds
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_batches_are_the_serial_ones_dealt_in_turn(self, world_size, drop_last):
        dealt = deal_validation(103, Batching(16, drop_last=drop_last), world_size)
        assert [rows.tolist() for _, rows in dealt] == serial_batches(103, 16, drop_last)
        assert [rank for rank, _ in dealt] == [n % world_size for n in range(len(dealt))]

    def test_no_rows_make_no_batches(self):
        assert deal_validation(0, Batching(16), 2) == []

    def test_a_rank_knows_its_batches(self):
        validation = deal_validation(10, Batching(4), 2)
        cut = Cut(Plan([np.arange(2), np.arange(2)], np.ones((2, 1), int)), validation)
        assert [rows.tolist() for rows in cut.validation_of(0)] == [[0, 1, 2, 3], [8, 9]]
        assert [rows.tolist() for rows in cut.validation_of(1)] == [[4, 5, 6, 7]]


class TestPieces:
    def test_no_sizes_make_no_pieces(self):
        assert pieces(np.arange(0), np.array([], dtype=int)) == []

    def test_rows_beyond_the_sizes_are_left_out(self):
        assert [p.tolist() for p in pieces(np.arange(7), np.array([2, 0, 3]))] == [[0, 1], [], [2, 3, 4]]
