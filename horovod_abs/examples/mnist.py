"""The data, the model and its evaluation, for PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from horovod_abs.examples import mnist_images


def load(*, seed: int = 0, test_images: int = 1000) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images of shape ``(1, 28, 28)``, normalised, and labels 0 to 9.

    Args:
        seed: Of the split; the same on every rank.
        test_images: How many of the 5,000 images are for testing.

    Raises:
        ValueError: nothing would be left for training or for testing.
    """
    mnist_images.check_test_images(test_images)
    pixels, digits = mnist_images.read()
    images, labels = torch.as_tensor(pixels).unsqueeze(1), torch.as_tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:test_images], order[test_images:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class SmallCNN(nn.Sequential):
    """Two convolutions and two dense layers, 52,138 parameters: 2 ms for 16 images, forward and backward."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The part of the images, 0 to 1, that ``model`` classifies rightly. The model stays in its mode."""
    images, labels = data.tensors
    was_training = model.training
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    model.train(was_training)
    return int(correct) / len(labels)
