"""Means over ranks that are exact although ranks see different numbers of samples, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Batch = TypeVar("Batch")


def mean_over_samples(
    measure: Callable[[Batch], Mapping[str, Any]],
    batches: Iterable[Batch],
    count: Callable[[Batch], int],
    gather: Callable[[Any], list[Any]],
) -> dict[str, float]:
    """Means of ``measure`` over the samples of all ranks' batches.

    Args:
        measure: Means over the samples of one batch, by name; the same names on every rank.
        batches: This rank's.
        count: Samples in a batch.
        gather: Something of this rank, of all ranks.

    Raises:
        ValueError: no rank had a sample.
    """
    sums: dict[str, float] = {}
    samples = 0
    for batch in batches:
        size = count(batch)
        samples += size
        for name, value in measure(batch).items():
            sums[name] = sums.get(name, 0.0) + float(value) * size
    parts = gather((sums, samples))
    total = sum(part[1] for part in parts)
    if total == 0:
        raise ValueError("no rank had a sample to evaluate")
    names = {name: None for part in parts for name in part[0]}
    return {name: sum(part[0].get(name, 0.0) for part in parts) / total for name in names}


def check_weight(weight: float) -> None:
    """Raise :class:`ValueError` for a rank's weight in a mean that is negative or not a number."""
    if not weight >= 0:
        raise ValueError(f"a weight must not be negative, got {weight!r}")


def check_total(total: float) -> None:
    """Raise :class:`ValueError` for weights of all ranks that are 0."""
    if total == 0:
        raise ValueError("the weights of all ranks are 0: there is nothing to average")
