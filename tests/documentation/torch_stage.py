"""What examples for PyTorch take as given; made when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod_abs.torch as hvd
from horovod_abs.observe.stopwatch import Stopwatch
from tests.documentation.examples import SAMPLES


class Stage:
    """Names and what they stand for."""

    epochs = 2
    torch = torch
    hvd: Any = hvd
    DataLoader = DataLoader
    loss_fn = staticmethod(torch.nn.functional.cross_entropy)
    cross_entropy = loss_fn

    @staticmethod
    def Net() -> torch.nn.Module:  # noqa: N802  (a class, in the guides)
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    @staticmethod
    def accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    @staticmethod
    def evaluate(model: torch.nn.Module) -> None:
        model(torch.randn(16, 4))

    @cached_property
    def train_set(self) -> TensorDataset:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x[:, :3].argmax(1))

    @property
    def test_set(self) -> TensorDataset:
        return self.train_set

    @cached_property
    def model(self) -> torch.nn.Module:
        return self.Net()

    @cached_property
    def optimizer(self) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    @cached_property
    def loader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(self.train_set, hvd.size(), hvd.rank())
        return DataLoader(self.train_set, batch_size=4, sampler=sampler)

    @cached_property
    def watch(self) -> Stopwatch:
        return Stopwatch()


def record(path: Path) -> None:
    """Leave the log of a run of one epoch; every rank calls it."""
    stage = Stage()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(stage.model.parameters(), lr=0.05), record=path)
    sampler = hvd.AdaptiveSampler(stage.train_set, optimizer)
    for x, y in optimizer.epoch(DataLoader(stage.train_set, batch_size=4, sampler=sampler)):
        optimizer.zero_grad()
        stage.loss_fn(stage.model(x), y).backward()
        optimizer.step(samples=len(x))
    hvd.average(0.0)  # the file is complete before anyone goes on
