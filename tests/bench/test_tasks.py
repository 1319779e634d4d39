from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from horovod_abs.bench import tasks
from horovod_abs.bench.tasks import TASKS, Batches, mnist_data


def test_images_to_train_to_tune_and_to_report_are_not_the_same() -> None:
    parts = [data.tensors[0] for data in mnist_data()]
    assert [len(part) for part in parts] == [3600, 700, 700]
    images = torch.cat(parts).flatten(1)
    assert len(torch.unique(images, dim=0)) == 5000


def test_one_cycle_rises_and_falls_over_the_budget() -> None:
    task = TASKS["fashion"]
    factors = [task.factor(share * task.budget) for share in (0, 0.15, 0.3, 0.65, 1, 2)]
    assert factors == pytest.approx([0.04, 0.52, 1, 0.5, 0, 0])
    assert TASKS["mnist"].factor(10**9) == 1


def test_batches_pass_over_all_data_before_any_comes_again() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.images: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.images += x.flatten().tolist()
            return self.weight * x.repeat(1, 2)

    data = torch.utils.data.TensorDataset(torch.arange(10.0).unsqueeze(1), torch.zeros(10, dtype=torch.long))
    model, batches = Seen(), Batches(data, seed=0)
    for samples in (3, 5, 4, 8):
        assert batches.gradients(model, samples) == samples
    assert sorted(model.images[:10]) == sorted(model.images[10:]) == list(range(10))


def test_fashion_images_are_read_from_the_original_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.arange(12000 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(12000, 28, 28)
    labels = (np.arange(12000) % 10).astype(np.uint8)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        with gzip.open(tmp_path / f"train-{kind}-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(head + array.tobytes())
    monkeypatch.setattr(tasks, "FASHION", tmp_path)
    train, tune, report = tasks.fashion_data.__wrapped__()
    assert [len(part) for part in (train, tune, report)] == [8000, 2000, 2000]
    assert train.tensors[0].shape == (8000, 1, 14, 14)
    assert TASKS["fashion"].model()(train.tensors[0][:2]).shape == (2, 10)


def test_missing_images_are_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FASHION", tmp_path)
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        tasks.fashion_data.__wrapped__()
