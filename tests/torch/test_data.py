"""How long an epoch is, how it repeats, and how many samples a batch holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from horovod_abs.epochs import epoch_batches
from horovod_abs.torch.data import count_samples, epoch_length

DATA = TensorDataset(torch.arange(10.0))


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_an_epoch_is_as_long_as_the_data_set() -> None:
    assert epoch_length(DataLoader(DATA, batch_size=3, drop_last=True), None, None) == 10


def test_an_epoch_may_be_as_long_as_one_says() -> None:
    assert epoch_length(DataLoader(DATA), 25, None) == 25
    assert epoch_length(DataLoader(Stream()), 25, None) == 25
    assert epoch_length(DataLoader(Stream()), None, 3) == math.inf
    assert epoch_length([1, 2], None, 3) == math.inf


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [1, 2], iter([])])
def test_data_without_a_length_need_an_end(loader: Any) -> None:
    with pytest.raises(
        ValueError, match=r"no length: say where the epoch ends with epoch\(loader, samples_per_epoch=…\) or rounds"
    ):
        epoch_length(loader, None, None)


@pytest.mark.parametrize(("samples", "rounds"), [(0, None), (-3, None), (None, 0), (None, -1), (float("nan"), None)])
def test_an_end_must_be_positive(samples: float | None, rounds: int | None) -> None:
    with pytest.raises(ValueError, match="needs a positive number of samples or rounds"):
        epoch_length(DataLoader(DATA), samples, rounds)


def test_an_epoch_has_one_end() -> None:
    with pytest.raises(ValueError, match="by samples_per_epoch= or by rounds=, not by both"):
        epoch_length(DataLoader(DATA), 1, 1)


def test_loaders_that_reorder_are_refused() -> None:
    loader = DataLoader(DATA, num_workers=1, in_order=False)
    for end in ((None, None), (5, None), (None, 5)):
        with pytest.raises(ValueError, match=r"in_order=False: .* Use in_order=True"):
            epoch_length(loader, *end)


def test_a_loader_is_begun_again_when_it_is_used_up() -> None:
    assert list(itertools.islice(epoch_batches([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_what_cannot_be_begun_again_ends() -> None:
    assert list(epoch_batches([])) == []
    assert list(epoch_batches(iter([1, 2]))) == [1, 2]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(3), "labels"], 3),
        ({"x": torch.zeros(6, 1), "y": torch.zeros(6)}, 6),
        ({"ids": ["a", "b"], "x": {"deep": torch.zeros(2, 9)}}, 2),
        ((("a", "b"), (torch.zeros(7), 1)), 7),
        (["text", "more text"], 2),
        ("abc", 3),
        (torch.zeros(0, 2), 0),
    ],
)
def test_the_samples_of_a_batch_are_the_length_of_its_first_tensor(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


def test_a_batch_that_has_no_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot count the samples of a batch of type int"):
        count_samples(3)
    with pytest.raises(ValueError, match="cannot count the samples of a batch of type Tensor"):
        count_samples(torch.tensor(1.0))
