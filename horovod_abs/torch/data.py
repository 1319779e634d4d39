"""Batches for an epoch: how long it is, and how many samples a batch holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_abs.epochs import check_limits


def epoch_length(loader: Iterable[Any], samples: float | None, rounds: int | None) -> float:
    """Samples after which an epoch over ``loader`` ends; infinity if it ends by rounds.

    Raises:
        ValueError: no length can be found, both were given, or the loader hands out batches in another order than
            it draws them.
    """
    check_limits(samples, rounds)
    if getattr(loader, "in_order", True) is False:
        raise ValueError("the loader has in_order=False: samples could not be counted exactly. Use in_order=True")
    if rounds is not None:
        return math.inf
    if samples is not None:
        return samples
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise ValueError(
            "the loader's data set has no length: say where the epoch ends with epoch(loader, samples_per_epoch=…) or "
            "rounds=…"
        ) from None


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor (or of itself, if it holds none).

    Raises:
        ValueError: nothing in it has a length.
    """
    tensor = _first_tensor(batch)
    if tensor is not None and tensor.dim() > 0:
        return len(tensor)
    try:
        return len(batch)
    except TypeError:
        raise ValueError(f"cannot count the samples of a batch of type {type(batch).__name__}") from None


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        for part in batch:
            found = _first_tensor(part)
            if found is not None:
                return found
    return None
