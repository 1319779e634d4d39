"""``AdaptiveSampler``: every sample of a data set exactly once an epoch, by whichever rank has time for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import Sampler

from horovod_abs.core.allocation import Loading
from horovod_abs.epochs import SharedEpochs

Batch = TypeVar("Batch")


class AdaptiveSampler(Sampler[int]):
    """Draws this rank's samples from a permutation that all ranks share.

    >>> sampler = hvd.AdaptiveSampler(train_set, optimizer)
    >>> loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    >>> for x, y in optimizer.epoch(loader):
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()
    ...     merged = optimizer.step(samples=len(x))
    >>> optimizer.samples_seen == len(train_set)  # every sample once, whoever drew it
    True

    How many a rank draws follows from its speed, which all ranks know from the ledger. Loader workers and prefetching
    work; ``len(loader)`` is not known in advance: ``optimizer.samples_seen`` is the measure of progress.

    Args:
        dataset: The data set, with a length; the same on every rank.
        optimizer: Made by ``DistributedOptimizer``.
        shuffle: Go through the data in a new random order in each epoch.
        seed: Of the random order; the same on every rank.
        drain: End each epoch with nothing pending. With ``False`` epochs flow into one another, which saves an
            epoch's tail; the run must then end with ``optimizer.synchronize()``.

    Raises:
        ValueError: an empty data set.
        TypeError: a data set without a length.
    """

    def __init__(
        self, dataset: Sized, optimizer: Any, shuffle: bool = True, seed: int = 0, *, drain: bool = True
    ) -> None:
        rounds = optimizer._rounds
        name = f"{rounds.name}.sampler.{len(rounds.samplers)}"
        self.epochs = SharedEpochs(
            len(dataset),
            rounds.driver,
            lambda values: cast("list[list[int]]", rounds.wire.gather(values, name)),
            shuffle=shuffle,
            seed=seed,
            drain=drain,
            number=len(rounds.samplers),
        )
        rounds.samplers.append(self)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way or comes next."""
        return self.epochs.epoch

    def __iter__(self) -> Iterator[int]:
        return self.epochs.indices()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches of one epoch; ``optimizer.epoch(loader)`` calls it.

        Raises:
            ValueError: the loader drops, reorders, or does not make batches.
        """

        def load() -> Iterable[Batch]:
            if not self.epochs.continues:
                return loader
            with torch.random.fork_rng(devices=[]):  # an iterator draws a seed, which an unbroken epoch does only once
                return iter(loader)

        return self.epochs.batches(loading_of(loader), load)

    def state_dict(self) -> dict[str, Any]:
        """Which epoch it is, and what has been used up in it; part of ``optimizer.state_dict()``."""
        return self.epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; ``optimizer.load_state_dict()`` calls it."""
        self.epochs.load_state_dict(state)


def adaptive_sampler_of(loader: Any) -> AdaptiveSampler | None:
    """The adaptive sampler that ``loader`` draws from, if there is one."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, AdaptiveSampler):
            return sampler
    return None


def loading_of(loader: Any) -> Loading:
    """The batch size of a ``DataLoader``, and the samples that its workers draw ahead.

    Raises:
        ValueError: the loader drops, reorders, or does not make batches.
    """
    batches = getattr(loader, "batch_sampler", None)
    batch = getattr(batches, "batch_size", None)
    if batch is None:
        raise ValueError("an AdaptiveSampler needs a DataLoader with a batch_size")
    if getattr(batches, "drop_last", False):
        raise ValueError("the loader has drop_last=True: every sample must be drawn. Use drop_last=False")
    if getattr(loader, "in_order", True) is False:
        raise ValueError("the loader has in_order=False: samples could not be counted exactly. Use in_order=True")
    return Loading(batch, loader.num_workers * (loader.prefetch_factor or 0) * batch)
