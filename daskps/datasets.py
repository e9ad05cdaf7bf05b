"""Image data sets to try daskps on, as arrays that are split into training and test rows.

Only numpy is imported here; scikit-learn is imported by the function that needs it.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Split = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]

__all__ = ["load_digits_images", "load_fashion_mnist"]

DEFAULT_FOLDER = "/usr/share/datasets/fashion-mnist"
PACKAGE = "dataset-fashion-mnist"

# The third byte of an IDX file. Everything wider than a byte is big-endian.
IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def load_digits_images() -> Split:
    """Load scikit-learn's handwritten digits as images.

    The split is stratified and always the same.

    Returns
    -------
    X_train : ndarray of shape (1437, 1, 8, 8), float32
        Training images, grey values in [0, 1].
    X_test : ndarray of shape (360, 1, 8, 8), float32
        Test images.
    y_train : ndarray of shape (1437,), int64
        The digits 0 to 9 that the training images show.
    y_test : ndarray of shape (360,), int64
        The digits that the test images show.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    X, y = load_digits(return_X_y=True)
    X = np.divide(X, 16, dtype=np.float32).reshape(-1, 1, 8, 8)
    y = y.astype(np.int64)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, stratify=y, random_state=0)
    return X_train, X_test, y_train, y_test


def load_fashion_mnist(path: str | os.PathLike[str] | None = None) -> Split:
    """Load Fashion-MNIST from its four IDX files, gzipped or not.

    Parameters
    ----------
    path : str or path-like, optional
        The folder with the files. Default: the environment variable ``DASKPS_DATA`` if it is set,
        else the folder of the Debian package ``dataset-fashion-mnist``.

    Returns
    -------
    X_train : ndarray of shape (60000, 1, 28, 28), float32
        Training images, grey values in [0, 1].
    X_test : ndarray of shape (10000, 1, 28, 28), float32
        Test images.
    y_train : ndarray of shape (60000,), int64
        The classes 0 to 9 of the training images.
    y_test : ndarray of shape (10000,), int64
        The classes of the test images.

    Raises
    ------
    FileNotFoundError
        A file is missing. The message says which package brings it.
    ValueError
        A file is damaged, or is not what its name says.
    """
    folder = Path(path or os.environ.get("DASKPS_DATA") or DEFAULT_FOLDER).expanduser()
    X_train, y_train = _read_images_and_labels(folder, "train")
    X_test, y_test = _read_images_and_labels(folder, "t10k")
    return X_train, X_test, y_train, y_test


def _read_images_and_labels(folder: Path, prefix: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images_file = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_file = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images = _read_bytes_array(images_file, ndim=3)
    labels = _read_bytes_array(labels_file, ndim=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels"
        )
    X = np.divide(images[:, np.newaxis], 255, dtype=np.float32)
    return X, labels.astype(np.int64)


def _find(folder: Path, name: str) -> Path:
    for file in (folder / f"{name}.gz", folder / name):
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"no file {name}.gz (or {name}) in the folder {folder}. The Debian package {PACKAGE} "
        f"brings it to {DEFAULT_FOLDER}: apt-get install {PACKAGE}. If you have the files "
        f"elsewhere, set the environment variable DASKPS_DATA to their folder."
    )


def _read_bytes_array(file: Path, ndim: int) -> NDArray[np.uint8]:
    array: NDArray[Any] = _read_idx(file)
    if array.dtype != np.uint8 or array.ndim != ndim:
        raise ValueError(
            f"{file} holds {array.ndim} dimension(s) of {array.dtype}, expected {ndim} of uint8"
        )
    return array


def _read_idx(file: Path) -> NDArray[Any]:
    """Read an IDX file: two zero bytes, dtype code, number of dimensions, dimensions, values."""
    content = _read(file)
    dtype, ndim = _parse_magic_number(file, content)
    start = 4 + 4 * ndim
    if len(content) < start:
        raise ValueError(f"{file} is truncated: {len(content)} bytes, but its header alone takes {start}")
    shape = tuple(int(side) for side in np.frombuffer(content, ">u4", count=ndim, offset=4))
    size = start + math.prod(shape) * dtype.itemsize
    if len(content) != size:
        raise ValueError(
            f"{file} has {len(content)} bytes, but its header announces the shape {shape} "
            f"of {dtype.name}, {size} bytes"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _read(file: Path) -> bytes:
    if file.suffix != ".gz":
        return file.read_bytes()
    try:
        with gzip.open(file) as stream:
            return stream.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}") from error


def _parse_magic_number(file: Path, content: bytes) -> tuple[np.dtype[Any], int]:
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ValueError(
            f"{file} is no IDX file: it begins with 0x{content[:4].hex()}, "
            f"expected two zero bytes, a type code and the number of dimensions"
        )
    code, ndim = content[2], content[3]
    if code not in IDX_DTYPES:
        raise ValueError(f"{file} has the unknown IDX type code 0x{code:02x}")
    return np.dtype(IDX_DTYPES[code]), ndim
