"""The data, the model and its evaluation, for Keras."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from numpy.typing import NDArray

from horovod_abs.examples import mnist_images

Images = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Images of shape ``(28, 28, 1)``, normalised, and labels 0 to 9."""


def load(*, seed: int = 0, test_images: int = 1000) -> tuple[Images, Images]:
    """Training and test set.

    Args:
        seed: Of the split; the same on every rank.
        test_images: How many of the 5,000 images are for testing.

    Raises:
        ValueError: nothing would be left for training or for testing.
    """
    mnist_images.check_test_images(test_images)
    pixels, labels = mnist_images.read()
    images = pixels[..., np.newaxis]
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:test_images], order[test_images:]
    return (images[train], labels[train]), (images[test], labels[test])


def small_cnn() -> keras.Model:
    """Two convolutions and two dense layers, 52,138 parameters: the same as PyTorch's."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def accuracy(weights: Sequence[NDArray[np.float32]], data: Images) -> float:
    """The part of the images, 0 to 1, that a model with these weights classifies rightly."""
    model = small_cnn()
    model.set_weights(weights)
    images, labels = data
    return float((np.argmax(model(images, training=False), axis=1) == labels).mean())
