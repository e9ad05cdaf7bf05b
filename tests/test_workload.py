import numpy as np
import pytest

from daskps import _workload, datasets


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_rows_are_the_first_of_all_and_always_the_same(data):
    few, more = _workload.load(data, 50), _workload.load(data, 50)
    assert len(few.X_train) == len(few.y_train) == 50
    assert len(few.X_test) == len(few.y_test) > 300
    for one, other in zip(few, more, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_images_are_as_large_as_those_of_fashion_mnist(data):
    assert _workload.load(data, 2).X_train.shape == (2, 1, 28, 28)


def test_enlarged_digits_are_the_same_images():
    large = _workload.load("digits").X_test[:, :, 2:26, 2:26]
    for down in range(3):
        for right in range(3):
            small = large[:, :, down::3, right::3]
            np.testing.assert_array_equal(small, datasets.load_digits_images()[1])


def test_a_part_of_the_rows_is_learned_at_the_same_rate():
    """How fast a net computes depends on what has become of its weights."""
    few, more = (_workload.new_net(_workload.load("digits", n), 32, 1) for n in (50, 500))
    assert few.lr == more.lr == 0.03
    assert _workload.new_net(_workload.load("synthetic", 50), 32, 1).lr == 0.01


def test_synthetic_images_look_like_fashion_mnist_and_can_be_learned():
    split = _workload.load("synthetic", 2000)
    assert split.X_train.shape == (2000, 1, 28, 28)
    assert split.X_train.dtype == np.float32
    # The nearest mean image tells classes apart, so a net can; but not one row in ten by chance.
    means = np.stack([split.X_train[split.y_train == k].mean(axis=0) for k in range(10)])
    distances = ((split.X_test[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    accuracy = (distances.argmin(axis=1) == split.y_test).mean()
    assert 0.5 < accuracy < 1


def test_stand_in_is_about_as_large_as_the_net_whose_place_it_takes():
    split = _workload.load("synthetic", 64)
    real = _workload.new_net(split, 32, 1).initialize()
    stand_in = _workload.stand_in_net(split, 32, 1, 0.5).fit(split.X_train, split.y_train)
    sizes = [sum(p.numel() for p in net.module_.parameters()) for net in (real, stand_in)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_net_starts_from_the_same_weights_every_time():
    split = _workload.load("synthetic", 64)
    first, second = (_workload.new_net(split, 32, 1).initialize() for _ in range(2))
    for one, other in zip(first.module_.parameters(), second.module_.parameters(), strict=True):
        assert (one == other).all()
