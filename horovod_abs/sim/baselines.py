"""How others train on unequal workers: the rules that the benchmarks compare with, on this package's engine.

Each is a :class:`horovod_abs.core.clocks.Clock`, or a function from what was measured to the next batches. Both learn
from merged ledger entries alone, so that all ranks come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from horovod_abs.core.clocks import Clock, Progress
from horovod_abs.core.ledger import Column, Entry, Floats, Ledger


class ProportionalSteps(Clock):
    """Local SGD whose ranks do steps in proportion to their speed: Hᵢ = H · vᵢ / mean v, as measured in the last round.

    In the first round every rank does H.

    Args:
        steps: H, the mean number of micro-batches of a rank in a round.
        size: Number of ranks.

    Raises:
        ValueError: ``steps`` is less than 1.

    References:
        Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767, for equal ranks.
    """

    def __init__(self, steps: int, size: int) -> None:
        if steps < 1:
            raise ValueError(f"a rank does at least 1 step in a round, not {steps}")
        self.steps = steps
        self.by_rank = [steps] * size

    def __repr__(self) -> str:
        return f"ProportionalSteps({self.steps}, {len(self.by_rank)})"

    def is_due(self, progress: Progress) -> bool:
        return progress.micro_batches >= self.by_rank[progress.rank]

    def limit(self, progress: Progress) -> float:
        return self.by_rank[progress.rank]

    def merged(self, ledger: Ledger) -> None:
        self.by_rank = _by_speed(ledger.recent[-1], self.steps) or self.by_rank


@lru_cache(maxsize=8)  # all ranks of a process ask for the same
def _by_speed(entry: Entry, steps: int) -> list[int]:
    """Steps of each rank in proportion to its speed in this round; none if nobody computed."""
    seconds = entry.column(Column.COMPUTE_SECONDS)
    speeds = np.divide(entry.column(Column.MICRO_BATCHES), seconds, out=np.zeros_like(seconds), where=seconds > 0)
    if not speeds.any():
        return []
    share = steps / speeds[speeds > 0].mean()
    return [max(1, round(share * speed)) for speed in speeds.tolist()]


class SharedBatches:
    """One batch a round and rank, of sizes that follow from what was merged.

    Args:
        start: Samples of each rank in the first round.
        follow: The batches of the next round, from the last ones and the entries of all rounds so far.
    """

    def __init__(self, start: Sequence[int], follow: Callable[[list[int], Sequence[Entry]], list[int]]) -> None:
        self._by_round = [list(start)]
        self._follow = follow

    def of(self, round: int, entries: Sequence[Entry]) -> list[int]:
        """Samples of each rank in this round, before which at least ``round`` entries are known."""
        while len(self._by_round) <= round:
            known = len(self._by_round)
            self._by_round.append(self._follow(self._by_round[-1], entries[:known]))
        return self._by_round[round]


def by_epoch(size: int, total: int, rounds: int) -> SharedBatches:
    """:func:`dynamic_batches` after every so many rounds, from the mean times of these; equal ones at first."""

    def follow(batches: list[int], entries: Sequence[Entry]) -> list[int]:
        if len(entries) % rounds:
            return batches
        seconds = [entry.column(Column.COMPUTE_SECONDS) for entry in entries[-rounds:]]
        return dynamic_batches(batches, np.mean(seconds, axis=0))

    return SharedBatches([total // size] * size, follow)


def by_steering(speeds: Sequence[float], total: int, smoothing: float = 0.2) -> SharedBatches:
    """:func:`steered_batches` after every round, from smoothed times; in proportion to the speeds at first.

    Args:
        speeds: Of the ranks, as they are known beforehand.
        total: Samples of all ranks in a round.
        smoothing: Weight of the newest time.
    """
    smooth: Floats | None = None

    def follow(batches: list[int], entries: Sequence[Entry]) -> list[int]:
        nonlocal smooth
        seconds = entries[-1].column(Column.COMPUTE_SECONDS)
        smooth = seconds if smooth is None else smoothing * seconds + (1 - smoothing) * smooth
        new = steered_batches(batches, smooth)
        if new != batches:
            smooth = smooth * np.array(new) / np.array(batches)
        return new

    equal = [total // len(speeds)] * len(speeds)
    return SharedBatches(dynamic_batches(equal, 1 / np.array(speeds)), follow)


def dynamic_batches(batches: Sequence[int], seconds: Floats) -> list[int]:
    """The next epoch's batches, in proportion to what each rank did a second; their sum stays.

    Args:
        batches: Samples of each rank in a step so far.
        seconds: That each rank computed on them, on average; 0 of one that takes part no longer, which keeps 1.

    Returns:
        Whole numbers of at least 1, of the same sum: what rounding leaves over goes to the largest fractions.

    Raises:
        ValueError: no rank computed.

    References:
        Ye et al., "DBS: Dynamic batch size for distributed deep neural network training", arXiv 2007.11831, section 3.
    """
    speeds = np.divide(batches, seconds, out=np.zeros(len(batches)), where=seconds > 0)
    if not speeds.any():
        raise ValueError("no rank has computed")
    return _whole(sum(batches) * speeds / speeds.sum())


def steered_batches(
    batches: Sequence[int], seconds: Floats, *, least: int = 1, most: float = math.inf, threshold: float = 0.05
) -> list[int]:
    """The next batches by a proportional controller: bᵢ − vᵢ (tᵢ − t̄), where that changes one by more than a threshold.

    Args:
        batches: Samples of each rank in a step so far.
        seconds: That each rank computed on them, smoothed.
        least: Of a rank's batch.
        most: Of a rank's batch.
        threshold: Relative change up to which all stays as it is.

    Returns:
        Whole numbers of the same sum.

    References:
        Tyagi and Sharma, "Taming resource heterogeneity in distributed ML training with dynamic batching",
        arXiv 2305.12213, section 3.
    """
    old = np.array(batches, dtype=np.float64)
    speeds = np.divide(old, seconds, out=np.zeros_like(old), where=seconds > 0)
    new = np.clip(old - speeds * (seconds - seconds.mean()), least, most)
    new *= old.sum() / new.sum()
    if (np.abs(new - old) <= threshold * old).all():
        return list(batches)
    return _whole(new)


def _whole(shares: Floats) -> list[int]:
    """Whole numbers of at least 1 near these, of the same sum."""
    total = round(float(shares.sum()))
    whole = np.maximum(np.floor(shares), 1).astype(int)
    order = np.argsort(-(shares - whole), kind="stable")
    for index in range(total - int(whole.sum())):
        whole[order[index % len(order)]] += 1
    for _ in range(int(whole.sum()) - total):
        whole[whole.argmax()] -= 1
    return [int(number) for number in whole]
