"""Exact epochs over a data set that all ranks share, whatever their speeds. Shared by both bindings.

The rule that divides the samples is :class:`horovod_abs.core.allocation.Allocation`; this is its state on one rank:
which epoch it is, what this rank has been handed, and what its loader has drawn ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_abs.core.allocation import Allocation, Loading
from horovod_abs.core.ledger import Entry
from horovod_abs.driver import Driver
from horovod_abs.errors import Mismatch, name_ranks

Batch = TypeVar("Batch")


class SharedEpochs:
    """Hands the samples of a data set to this rank, so that all ranks together draw each exactly once an epoch.

    Args:
        length: Samples in the data set.
        driver: This rank's driver.
        gather: Gathers whole numbers of all ranks; a collective call.
        shuffle: Go through the data in a new random order in each epoch.
        seed: Of the random order; the same on every rank.
        drain: End each epoch with nothing pending. Without it the next epoch's samples follow at once, and the run
            must end with ``synchronize()``.
        number: Tells it apart in the run log.

    Attributes:
        epoch: Number of the epoch that is under way or comes next.
        handed: Samples that the loader has drawn from :meth:`indices`.

    Raises:
        ValueError: an empty data set.
    """

    def __init__(
        self,
        length: int,
        driver: Driver,
        gather: Callable[[list[int]], list[list[int]]],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drain: bool = True,
        number: int = 0,
    ) -> None:
        if length < 1:
            raise ValueError("the data set is empty")
        self.epoch = 0
        self._length = length
        self._driver = driver
        self._gather = gather
        self._shuffle = shuffle
        self._seed = seed
        self._drain = drain
        self._number = number
        self._allocation: Allocation | None = None
        self._description: dict[str, Any] = {}
        self._active = False
        self.handed = 0
        self._stream: Iterator[Any] | None = None
        self._orders: dict[int, NDArray[np.int64]] = {}
        driver.on_entry.append(self._merged)

    # -- what a loader draws from ----------------------------------------------------------------------------------

    def indices(self) -> Iterator[int]:
        """The indices of this rank, from the first that it has not used up.

        While the queue is empty and more may come, the rank takes part in exchanges without data.

        Raises:
            RuntimeError: no epoch is under way.
        """
        allocation = self._allocation
        if allocation is None or not self._active:
            raise RuntimeError("an adaptive sampler works inside optimizer.epoch(loader): iterate over that instead")
        engine = self._driver.engine
        queue, skip, part = allocation.queues[self._driver.rank], int(allocation.drawn[self._driver.rank]), 0
        self.handed = 0
        while True:
            if part == len(queue) or (part == len(queue) - 1 and skip >= queue[part][1] - queue[part][0]):
                if allocation.exhausted or engine.ending or not engine.epoch_open:
                    return
                self._driver.starve()
                continue
            start, stop = queue[part]
            if skip >= stop - start:
                skip, part = skip - (stop - start), part + 1
                continue
            self.handed += 1
            yield self._index(start + skip)
            skip += 1

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self._length) if not self._drain else (self.epoch, position)
        if not self._shuffle:
            return offset
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = np.random.default_rng((self._seed, epoch)).permutation(self._length)
        return int(self._orders[epoch][offset])

    @property
    def continues(self) -> bool:
        """Whether the epoch that was begun last goes on with what was handed out before."""
        return bool(self._description.get("continued"))

    # -- one epoch -------------------------------------------------------------------------------------------------

    def batches(self, loading: Loading, load: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """This rank's batches of one epoch; all ranks call it.

        Args:
            loading: How this rank loads its data.
            load: Begins to load batches of ``loading.batch`` samples, from :meth:`indices`.

        Raises:
            Mismatch: the ranks' data sets or seeds differ.
        """
        if self._driver.engine.stopped:
            return iter(())
        return self._drained(loading, load) if self._drain else self._flowing(loading, load)

    def _drained(self, loading: Loading, load: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        allocation = self._begin(loading)
        counter = _Counter(self, allocation, loading.batch, self._driver.rank)
        rest = self._length - float(allocation.drawn.sum())
        try:
            yield from self._driver.epoch(
                load(), counter, drawn=rest, exact=True, is_last=counter.is_last, sampler=self._description
            )
        finally:
            self._active = False
            if not self._driver.engine.stopped or allocation.drawn.sum() >= self._length:
                self._allocation = None
                self.epoch += 1

    def _flowing(self, loading: Loading, load: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        if self._stream is None:
            counter = _Counter(self, self._begin(loading), loading.batch, self._driver.rank)
            self._stream = self._driver.epoch(load(), counter, sampler=self._description)
        assert self._allocation is not None
        target = (self.epoch + 1) * self._length
        try:
            while self._allocation.drawn.sum() < target:
                batch = next(self._stream, None)
                if batch is None:
                    return
                yield batch
        except GeneratorExit:
            self._end_stream()
            raise
        self.epoch += 1

    def settle(self) -> None:
        """All ranks have closed: end an epoch that flows on, so that the next one begins at what is not used up."""
        if self._stream is not None:
            self._driver.engine.abandon_epoch()
            self._end_stream()

    def _end_stream(self) -> None:
        stream, self._stream, self._active = self._stream, None, False
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    def _begin(self, loading: Loading) -> Allocation:
        mine = [loading.batch, loading.ahead, self._length, self._seed, self.epoch, self._shuffle, self._drain]
        everyone = self._gather([int(value) for value in mine])
        for column, what in enumerate(("length", "seed", "epoch", "shuffle", "drain"), start=2):
            others = [rank for rank, row in enumerate(everyone) if row[column] != everyone[0][column]]
            if others:
                raise Mismatch(
                    self._driver.rank,
                    f"the sampler's {what} on {name_ranks(others)} differs from rank 0's (here: {mine[column]})",
                    "Give every rank the same data set, seed and options",
                )
        loadings = [Loading(row[0], row[1]) for row in everyone]
        self._description = {
            "number": self._number,
            "length": self._length,
            "seed": self._seed,
            "epoch": self.epoch,
            "shuffle": self._shuffle,
            "drain": self._drain,
            "continued": self._allocation is not None,
            "loading": tuple((row[0], row[1]) for row in everyone),
        }
        if self._allocation is None:
            self._allocation = Allocation(self._length, loadings, endless=not self._drain)
        else:
            self._allocation.loading = loadings
        self._active = True
        return self._allocation

    def _merged(self, entry: Entry) -> None:
        if self._active and self._allocation is not None:
            self._allocation.merge(entry)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Which epoch it is, and what has been handed out and used up in it."""
        return {"epoch": self.epoch, "allocation": self._allocation.state_dict() if self._allocation else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Raises :class:`ValueError` for a data set of another length."""
        saved = state["allocation"]
        if saved is not None and saved["length"] != self._length:
            raise ValueError(f"the checkpoint's data set has {saved['length']} samples, this one {self._length}")
        self.epoch = int(state["epoch"])
        self._allocation = None if saved is None else Allocation.from_state_dict(saved)


def check_limits(samples: float | None, rounds: int | None) -> None:
    """Raise :class:`ValueError` unless at most one limit of an epoch is given, and is positive."""
    if samples is not None and rounds is not None:
        raise ValueError("an epoch ends by samples_per_epoch= or by rounds=, not by both")
    for limit in (samples, rounds):
        if limit is not None and not limit > 0:
            raise ValueError(f"an epoch needs a positive number of samples or rounds, got {limit!r}")


def epoch_batches(loader: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of ``loader``, begun again whenever they are used up; ends only if there are none."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return


class _Counter:
    """Counts the samples of a rank's batches as they come: all are full but its last one."""

    def __init__(self, epochs: SharedEpochs, allocation: Allocation, batch: int, rank: int) -> None:
        self._epochs = epochs
        self._allocation = allocation
        self._batch = batch
        self._rank = rank
        self._before = allocation.drawn[rank]
        self._counted = 0

    def __call__(self, batch: object) -> int:
        samples = min(self._batch, self._epochs.handed - self._counted)
        self._counted += samples
        return samples

    def is_last(self) -> bool:
        """Whether the batch counted last is the rank's last of the epoch."""
        whole = self._before + self._counted == self._allocation.assigned[self._rank]
        return bool(whole) and self._allocation.exhausted
