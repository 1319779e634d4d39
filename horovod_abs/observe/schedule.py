"""Which samples each rank had in each round of a recorded run: what run log and sampler's rule tell together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from horovod_abs.core.allocation import Allocation, Loading
from horovod_abs.core.ledger import Column, Flag
from horovod_abs.observe.runlog import Closed, Epoch, EpochEnd, Round, RunLog, RunLogError, Sampler

MicroBatch = list[int]


class ReplayError(RunLogError):
    """The run cannot be repeated; says why, and what to do."""


@dataclass(frozen=True)
class RecordedRound:
    """What all ranks computed in one round.

    Attributes:
        micro_batches: For each rank the indices of the samples of each of its micro-batches.
        drained: Whether nothing was pending when it began: all rounds before were applied.
        learning_rates: That its merge used, by parameter group; ``None`` leaves the optimizer's as they are.
    """

    micro_batches: Sequence[Sequence[MicroBatch]]
    drained: bool = False
    learning_rates: Sequence[float] | None = None

    def samples(self, rank: int) -> int:
        """Samples of one rank."""
        return sum(len(batch) for batch in self.micro_batches[rank])

    @property
    def batch(self) -> int:
        """Samples of all ranks."""
        return sum(self.samples(rank) for rank in range(len(self.micro_batches)))


def recorded_rounds(log: RunLog) -> list[RecordedRound]:
    """The rounds of a run, with the samples that each rank had.

    Raises:
        ReplayError: the log does not tell which samples those were.
    """
    log.entries  # noqa: B018  (raises if the log lacks its beginning)
    rounds: list[RecordedRound] = []
    handed_out: _HandedOut | None = None
    active, drained = False, True
    for line in log.lines:
        if isinstance(line, Epoch):
            if line.sampler is None:
                raise ReplayError(
                    f"{log.path}: the epoch that begins with round {line.round} has no AdaptiveSampler, so which "
                    "samples each rank had is not known. Record a run whose loader has one"
                )
            handed_out = _HandedOut.begin(log.path, line.sampler, handed_out)
            active = True
        elif isinstance(line, EpochEnd):
            active = False
        elif isinstance(line, Closed):
            drained = True
            if handed_out is not None:
                handed_out.check(line.round)
        elif isinstance(line, Round):
            micro_batches = handed_out.take(line) if active and handed_out is not None else _nothing(log.path, line)
            rounds.append(RecordedRound(micro_batches, drained, line.learning_rates))
            drained = False
    return rounds


def _nothing(path: Path, line: Round) -> list[list[MicroBatch]]:
    if line.entry.weight:
        raise ReplayError(
            f"{path}: round {line.round} has samples outside any epoch, so which ones is not known. Record a run that "
            "trains in optimizer.epoch(loader), with an AdaptiveSampler"
        )
    return [[] for _ in line.rows]


class _HandedOut:
    """The samples that an adaptive sampler hands out, and how far each rank has come in them."""

    def __init__(self, path: Path, sampler: Sampler, loading: list[Loading]) -> None:
        self._path = path
        self._sampler = sampler
        self._allocation = Allocation(sampler.length, loading, endless=not sampler.drain)
        self._taken = [0] * len(loading)
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def begin(cls, path: Path, sampler: Sampler, before: _HandedOut | None) -> _HandedOut:
        """An epoch begins, or goes on with what was handed out before."""
        loading = [Loading(batch, ahead) for batch, ahead in sampler.loading]
        if before is None or not sampler.continued:
            return cls(path, sampler, loading)
        if before._sampler.number != sampler.number:
            raise ReplayError(f"{path}: the run has several samplers with open epochs, which a replay cannot follow")
        before._allocation.loading = loading
        before._sampler = sampler
        return before

    def take(self, line: Round) -> list[list[MicroBatch]]:
        """The micro-batches of a round, by rank."""
        entry = line.entry
        if entry.any_raised(Flag.NONFINITE):
            self._refuse(line.round, "gradients that were not finite were dropped")
        found = []
        for rank, samples in enumerate(entry.column(Column.WEIGHT)):
            begin, size = self._taken[rank], self._allocation.loading[rank].batch
            if samples != int(samples) or begin + samples > self._allocation.assigned[rank]:
                self._refuse(line.round, "samples= was not the number of samples in the batch")
            indices = list(self._indices(rank, begin, begin + int(samples)))
            micro_batches = [indices[start : start + size] for start in range(0, len(indices), size)]
            if len(micro_batches) != entry.rows[rank, Column.MICRO_BATCHES]:
                self._refuse(line.round, "a batch was skipped, or samples= was not its number of samples")
            self._taken[rank] += int(samples)
            found.append(micro_batches)
        self._allocation.merge(entry)
        return found

    def check(self, round: int) -> None:
        """All ranks have closed: what was drawn must have been trained on."""
        if any(taken != drawn for taken, drawn in zip(self._taken, self._allocation.drawn, strict=True)):
            self._refuse(round - 1, "a batch was drawn and skipped")

    def _refuse(self, round: int, why: str) -> None:
        raise ReplayError(
            f"{self._path}: the samples of round {round} or of one before cannot be told: {why}. Only runs in which "
            "every batch is stepped on, with its number of samples, can be replayed"
        )

    def _indices(self, rank: int, begin: int, end: int) -> Iterator[int]:
        passed = 0
        for start, stop in self._allocation.queues[rank]:
            for offset in range(max(begin - passed, 0), min(end - passed, stop - start)):
                yield self._index(start + offset)
            passed += stop - start

    def _index(self, position: int) -> int:
        epoch, offset = self._sampler.epoch, position
        if not self._sampler.drain:
            epoch, offset = divmod(position, self._sampler.length)
        if not self._sampler.shuffle:
            return offset
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            order = np.random.default_rng((self._sampler.seed, epoch)).permutation(self._sampler.length)
            self._orders[epoch] = order.tolist()
        return self._orders[epoch][offset]
