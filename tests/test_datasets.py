import gzip
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from daskps import datasets
from daskps.datasets import load_digits_images, load_fashion_mnist

RNG = np.random.default_rng(0)
PIXELS = {
    "train": RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "t10k": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
}
LABELS = {
    "train": np.array([9, 0, 3, 3, 1], dtype=np.uint8),
    "t10k": np.array([2, 7, 9], dtype=np.uint8),
}


def idx(array, code=0x08):
    """The bytes of an IDX file."""
    header = struct.pack(">BBBB", 0, 0, code, array.ndim)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(file, content):
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.fixture(params=[".gz", ""], ids=["gzipped", "plain"])
def folder(request, tmp_path):
    """A small Fashion-MNIST of five training and three test images."""
    for prefix in ("train", "t10k"):
        write(tmp_path / f"{prefix}-images-idx3-ubyte{request.param}", idx(PIXELS[prefix]))
        write(tmp_path / f"{prefix}-labels-idx1-ubyte{request.param}", idx(LABELS[prefix]))
    return tmp_path


def file_in(folder, name):
    return next(folder.glob(f"{name}*"))


def test_digits_have_the_documented_shapes_and_values():
    X_train, X_test, y_train, y_test = load_digits_images()
    assert X_train.shape == (1437, 1, 8, 8)
    assert X_test.shape == (360, 1, 8, 8)
    assert X_train.dtype == X_test.dtype == np.float32
    assert y_train.dtype == y_test.dtype == np.int64
    assert X_train.min() == 0
    assert X_train.max() == 1
    assert set(np.unique(X_train * 16)) == set(range(17))


def test_digits_split_is_stratified_and_always_the_same():
    first, second = load_digits_images(), load_digits_images()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    share = np.bincount(first[3]) / np.bincount(np.concatenate(first[2:]))
    np.testing.assert_allclose(share, 0.2, atol=0.01)


def test_digits_are_the_rows_of_scikit_learn():
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = load_digits_images()
    ours = np.column_stack(
        [16 * np.concatenate([X_train, X_test]).reshape(-1, 64), np.concatenate([y_train, y_test])]
    )
    theirs = np.column_stack([X, y])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_fashion_mnist_reads_gzipped_and_plain_files(folder):
    X_train, X_test, y_train, y_test = load_fashion_mnist(folder)
    assert X_train.shape == (5, 1, 28, 28)
    assert X_train.dtype == X_test.dtype == np.float32
    assert y_train.dtype == y_test.dtype == np.int64
    np.testing.assert_allclose(X_train[:, 0] * 255, PIXELS["train"], rtol=1e-6)
    np.testing.assert_allclose(X_test[:, 0] * 255, PIXELS["t10k"], rtol=1e-6)
    np.testing.assert_array_equal(y_train, LABELS["train"])
    np.testing.assert_array_equal(y_test, LABELS["t10k"])
    assert 0 <= X_train.min() < X_train.max() <= 1


def test_fashion_mnist_folder_comes_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("DASKPS_DATA", str(folder))
    assert len(load_fashion_mnist()[0]) == 5


def test_fashion_mnist_path_goes_before_the_environment(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("DASKPS_DATA", str(tmp_path / "nowhere"))
    assert len(load_fashion_mnist(str(folder))[0]) == 5


def test_fashion_mnist_default_folder_is_the_debian_package(monkeypatch, folder):
    monkeypatch.setenv("DASKPS_DATA", "")
    monkeypatch.setattr(datasets, "DEFAULT_FOLDER", str(folder))
    assert len(load_fashion_mnist()[0]) == 5


def test_missing_file_names_file_folder_package_and_variable(folder):
    missing = file_in(folder, "t10k-labels")
    missing.unlink()
    with pytest.raises(FileNotFoundError) as error:
        load_fashion_mnist(folder)
    message = str(error.value)
    for part in (
        "t10k-labels-idx1-ubyte.gz",
        str(folder),
        "apt-get install dataset-fashion-mnist",
        "DASKPS_DATA",
    ):
        assert part in message


def test_missing_folder_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        load_fashion_mnist(tmp_path / "nowhere")


IMAGES = idx(PIXELS["train"])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no IDX file: it begins with 0x,"),
        (b"\0\0\x08", "no IDX file: it begins with 0x000008"),
        (b"\x89PNG" + IMAGES, "no IDX file: it begins with 0x89504e47"),
        (b"\0\0\x0a\x03" + IMAGES[4:], "unknown IDX type code 0x0a"),
        (IMAGES[:10], "truncated: 10 bytes, but its header alone takes 16"),
        (
            IMAGES[:-1],
            r"3935 bytes, but its header announces the shape \(5, 28, 28\) of uint8, 3936",
        ),
        (IMAGES + b"\0", "3937 bytes, but its header announces"),
        (IMAGES[:4] + b"\xff" * 12 + IMAGES[16:], "3936 bytes, but its header announces"),
        (idx(PIXELS["train"][0]), r"holds 2 dimension\(s\) of uint8, expected 3 of uint8"),
        (idx(PIXELS["train"].astype(">i2"), 0x0B), "of >i2, expected 3 of uint8"),
        (idx(PIXELS["train"][:4]), "has 4 images, but .*train-labels.* has 5 labels"),
    ],
)
def test_damaged_images_are_named(folder, content, complaint):
    file = file_in(folder, "train-images")
    write(file, content)
    with pytest.raises(ValueError, match=complaint) as error:
        load_fashion_mnist(folder)
    assert str(file) in str(error.value)


def test_damaged_labels_are_named(folder):
    file = file_in(folder, "t10k-labels")
    write(file, idx(PIXELS["t10k"]))
    with pytest.raises(ValueError, match=r"holds 3 dimension\(s\).*expected 1") as error:
        load_fashion_mnist(folder)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda gz: gz[: len(gz) // 2],
        lambda gz: gz[:-4] + b"\xff\xff\xff\xff",
        lambda gz: gz[:20] + bytes(b ^ 0xFF for b in gz[20:40]) + gz[40:],
        lambda gz: b"PK" + gz[2:],
        lambda gz: gz[:-9],
    ],
    ids=["half", "wrong length", "flipped bits", "another format", "no end"],
)
def test_damaged_gzip_is_named(tmp_path, damage):
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(gzip.compress(IMAGES)))
    with pytest.raises(ValueError, match="not a whole gzip file") as error:
        datasets._read_idx(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(("code", "dtype"), datasets.IDX_DTYPES.items())
def test_every_idx_type_keeps_its_values(tmp_path, code, dtype):
    values = np.array([[0, 1, 2], [3, 100, 127]], dtype=dtype)
    write(tmp_path / "values", idx(values, code))
    array = datasets._read_idx(tmp_path / "values")
    assert array.dtype == values.dtype
    np.testing.assert_array_equal(array, values)


def test_the_real_files_if_they_are_installed():
    try:
        X_train, X_test, y_train, y_test = load_fashion_mnist()
    except FileNotFoundError as error:
        pytest.skip(f"Fashion-MNIST is not installed: {error}")
    assert X_train.shape == (60000, 1, 28, 28)
    assert X_test.shape == (10000, 1, 28, 28)
    np.testing.assert_array_equal(np.bincount(y_train), [6000] * 10)
    np.testing.assert_array_equal(np.bincount(y_test), [1000] * 10)
    assert X_train.mean(dtype=float) == pytest.approx(0.2860, abs=1e-4)
    assert y_test[:5].tolist() == [9, 2, 1, 1, 6]


def test_import_brings_numpy_alone():
    script = "import sys, daskps.datasets; print('sklearn' in sys.modules, 'torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == ["False", "False"]
