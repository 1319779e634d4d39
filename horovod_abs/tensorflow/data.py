"""Batches for an epoch: how long it is, and how many samples a batch holds."""

from __future__ import annotations

import math
from typing import Any

import keras

from horovod_abs.epochs import check_limits


def epoch_length(samples: float | None, rounds: int | None) -> float:
    """Samples after which an epoch ends; infinity if it ends by rounds.

    Raises:
        ValueError: neither or both were given.
    """
    check_limits(samples, rounds)
    if rounds is not None:
        return math.inf
    if samples is None:
        raise ValueError(
            "how many samples the batches hold is not known: say where the epoch ends with epoch(batches, "
            "samples_per_epoch=…) or rounds=…, or use hvd.adaptive_dataset"
        )
    return samples


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first array (or of itself, if it holds none).

    Raises:
        ValueError: nothing in it has a length.
    """
    for part in keras.tree.flatten(batch):
        shape = getattr(part, "shape", None)
        if shape is not None and len(shape) > 0:
            return int(shape[0])
    try:
        return len(batch)
    except TypeError:
        raise ValueError(f"cannot count the samples of a batch of type {type(batch).__name__}") from None
