import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from daskps._random import LOCK, RankStream, Stream, seeded, stream


def draw():
    """One number of every generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class TestSeeded:
    def test_same_seed_gives_the_same_numbers(self):
        with seeded(5):
            first = draw()
        draw()
        with seeded(5):
            assert draw() == first
        with seeded(6):
            assert not set(draw()) & set(first)

    def test_generators_are_as_before_afterwards(self):
        with seeded(0):
            expected = draw(), draw()
        with seeded(0):
            before = draw()
            with seeded(5):
                draw()
            assert (before, draw()) == expected

    def test_generators_are_as_before_after_an_error(self):
        with seeded(0):
            expected = draw()
        with seeded(0):
            with pytest.raises(KeyError), seeded(5):
                raise KeyError
            assert draw() == expected

    def test_none_leaves_the_generators_alone(self):
        with seeded(0):
            expected = draw(), draw()
        with seeded(0):
            with seeded(None):
                inside = draw()
            assert (inside, draw()) == expected

    def test_nets_that_are_made_side_by_side_under_the_lock_have_the_weights_of_their_seed(self):
        def make(seed):
            with LOCK, seeded(seed):
                return torch.nn.Linear(3, 3).weight.tolist()

        made = {}
        threads = [
            threading.Thread(target=lambda seed=seed: made.update({seed: make(seed)})) for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert made == {seed: make(seed) for seed in range(6)}


class TestStream:
    def test_names_a_seed_of_32_bits(self):
        seeds = [stream(*key) for key in np.ndindex(3, 10, 4)]
        assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)

    def test_differs_for_every_seed_epoch_and_rank(self):
        assert len({stream(*key) for key in np.ndindex(3, 10, 4)}) == 120

    def test_repeats_itself(self):
        assert stream(2**31 - 2, 7, 3) == stream(2**31 - 2, 7, 3)

    def test_order_of_the_key_matters(self):
        assert stream(1, 2, 3) != stream(1, 3, 2)


class TestOwnStream:
    def test_goes_on_where_it_was_left(self):
        one, other = Stream(3), Stream(3)
        with one.drawn():
            at_once = [draw(), draw()]
        found = []
        for _ in range(2):
            draw()
            with other.drawn():
                found.append(draw())
        assert found == at_once

    def test_leaves_the_numbers_of_the_process_alone(self):
        with seeded(0):
            expected = [draw(), draw()]
        with seeded(0):
            stream = Stream(3)
            found = [draw()]
            with stream.drawn():
                draw()
            found.append(draw())
        assert found == expected

    def test_is_put_back_after_an_error(self):
        with seeded(0):
            expected = draw()
        with seeded(0):
            with pytest.raises(KeyError), Stream(3).drawn():
                raise KeyError
            assert draw() == expected


class TestRankStream:
    def test_goes_on_where_it_was(self):
        with seeded(3):
            expected = [draw() for _ in range(4)]
        ours = RankStream(3)
        drawn = []
        for _ in range(4):
            with ours.lent():
                drawn.append(draw())
            with seeded(5):
                draw()
        ours.close()
        assert drawn == expected

    def test_leaves_no_trace(self):
        with seeded(0):
            expected = draw(), draw()
        with seeded(0):
            first = draw()
            ours = RankStream(3)
            with ours.lent():
                draw()
            ours.close()
            assert (first, draw()) == expected

    def test_is_not_what_others_find_who_do_not_seed(self):
        with seeded(0):
            expected = draw()
        with seeded(0):
            ours = RankStream(3)
            with ours.lent():
                draw()
            with seeded(None):
                assert draw() == expected
            ours.close()

    def test_goes_on_after_an_interruption_inside_of_a_piece(self):
        with seeded(3):
            expected = [draw() for _ in range(3)]
        ours = RankStream(3)
        with ours.lent():
            drawn = [draw()]
            with seeded(5):
                draw()
            drawn.append(draw())
            with ours.paused(), seeded(5):
                draw()
            drawn.append(draw())
        ours.close()
        assert drawn == expected

    def test_lets_other_threads_draw_while_it_is_paused(self):
        def seed():
            with LOCK, seeded(5):
                return draw()

        ours = RankStream(3)
        with ThreadPoolExecutor(1) as pool, ours.lent(), ours.paused():
            drawn = pool.submit(seed).result(timeout=60)
        ours.close()
        with seeded(5):
            assert drawn == draw()
