"""What the benchmarks train: data, model, optimizer and schedule, small enough for two cores and real all the same."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from horovod_abs.bench.resnet import ResNet18
from horovod_abs.examples import mnist

FASHION = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
"""Where the images are: by default where Debian's package ``dataset-fashion-mnist`` puts them."""


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        name: For people.
        data: Training, validation and test set; always the same split.
        model: Makes one.
        target: Accuracy to reach.
        budget: Samples after which the ideal machine's run counts as a miss; others get the time in which it does them.
        one_cycle: Whether the learning rate rises and falls once over the budget, by samples; constant otherwise.
        rate: The learning rate, divided by 1 − momentum, that the search begins with.
        weight_decay: Of the optimizer.
    """

    name: str
    data: Callable[[], tuple[TensorDataset, TensorDataset, TensorDataset]]
    model: Callable[[], nn.Module]
    target: float
    budget: int
    rate: float
    one_cycle: bool = False
    weight_decay: float = 0.0

    @property
    def evaluate_every(self) -> int:
        """Samples: a quarter epoch."""
        return len(self.data()[0]) // 4

    def factor(self, samples: float) -> float:
        """Of the learning rate after so many samples: up over the first 30 %, then down to 0, by cosines."""
        if not self.one_cycle:
            return 1.0
        share = min(samples / self.budget, 1.0)
        if share < 0.3:
            return 0.04 + 0.96 * (1 - math.cos(math.pi * share / 0.3)) / 2
        return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2


class SmallCNN(nn.Sequential):
    """Two convolutions and a dense layer for MNIST images of half the size, 9,930 parameters, 1.4 ms for 16 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


@cache
def mnist_data() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """The 5,000 MNIST images at half their width and height: 3,600 to train, 700 to tune, 700 to report."""
    train, test = mnist.load(seed=0, test_images=1400)
    return _split(
        *(_halved(*data.tensors) for data in (train, test)),
        held_out=700,
    )


@cache
def fashion_data() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Fashion-MNIST at half its width and height: 8,000 images to train, 2,000 to tune, 2,000 to report.

    Raises:
        FileNotFoundError: Debian's package is not installed.
    """
    images, labels = (_read(FASHION / f"train-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    order = np.random.default_rng(0).permutation(len(labels))[:12000]
    pixels = torch.from_numpy(images[order]).float().div(255).sub(0.286).div(0.353).unsqueeze(1)
    digits = torch.from_numpy(labels[order]).long()
    halved = nn.functional.avg_pool2d(pixels, 2)
    train, rest = TensorDataset(halved[:8000], digits[:8000]), TensorDataset(halved[8000:], digits[8000:])
    return _split(train, rest, held_out=2000)


TASKS = {
    "mnist": Task("a small CNN on MNIST", mnist_data, SmallCNN, target=0.95, budget=144_000, rate=0.4),
    "fashion": Task(
        "ResNet-18 of width 8 on Fashion-MNIST",
        fashion_data,
        lambda: ResNet18(width=8, channels=1),
        target=0.88,
        budget=176_000,
        rate=0.4,
        one_cycle=True,
        weight_decay=5e-4,
    ),
}
"""By name: tier 1 and tier 2 of the comparison."""


class Batches:
    """Micro-batches of one shuffled pass after the other, handed out in the order in which ranks ask.

    Args:
        data: Images and labels.
        seed: Of the order.
    """

    def __init__(self, data: TensorDataset, seed: int) -> None:
        self._images, self._labels = data.tensors
        self._random = np.random.default_rng(seed)
        self._order = torch.empty(0, dtype=torch.long)

    def gradients(self, model: nn.Module, samples: int) -> float:
        """Leave those of the next micro-batch, of so many samples, in a model; returns its samples."""
        while len(self._order) < samples:
            passing = torch.from_numpy(self._random.permutation(len(self._labels)))
            self._order = torch.cat([self._order, passing])
        chosen, self._order = self._order[:samples], self._order[samples:]
        model.zero_grad()
        nn.functional.cross_entropy(model(self._images[chosen]), self._labels[chosen]).backward()
        return float(samples)


def _split(
    train: TensorDataset, rest: TensorDataset, *, held_out: int
) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    images, labels = rest.tensors
    return (
        train,
        TensorDataset(images[:held_out], labels[:held_out]),
        TensorDataset(images[held_out:], labels[held_out:]),
    )


def _halved(images: torch.Tensor, labels: torch.Tensor) -> TensorDataset:
    return TensorDataset(nn.functional.avg_pool2d(images, 2), labels)


def _read(path: Path) -> np.ndarray:
    """The array of an IDX file."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing. Remedy: apt-get install dataset-fashion-mnist, on Debian, or set FASHION_MNIST to a "
            "folder with the four original files"
        )
    with gzip.open(path) as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
