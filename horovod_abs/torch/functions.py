"""Averages over ranks that are exact although ranks see different numbers of samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import Sampler

from horovod_abs.averages import Batch, check_total, check_weight, mean_over_samples
from horovod_abs.rounds import rounds_of
from horovod_abs.torch.data import count_samples


def average(
    value: float | torch.Tensor, weight: float = 1.0, name: str | None = None, process_set: Any = hvd.global_process_set
) -> Any:
    """Mean of ``value`` over ranks, each with its ``weight``; every rank calls it.

    >>> hvd.average(0.25, weight=100)  # on every rank the same, so is the mean
    0.25

    Args:
        value: A number, or a tensor of the same shape on every rank.
        weight: This rank's weight, e.g. the number of samples that ``value`` is a mean over. A rank with weight 0
            takes part and its value does not count, not even if it is NaN.
        name: Name of the exchange, the same on every rank.
        process_set: The ranks that take part.

    Returns:
        The mean, in float64: a float for a number, a tensor for a tensor.

    Raises:
        ValueError: a negative weight, or weights that are all 0.
    """
    check_weight(weight)
    tensor = torch.as_tensor(value, dtype=torch.float64)
    weighted = tensor * weight if weight else torch.zeros_like(tensor)
    packed = torch.cat([weighted.reshape(-1), weighted.new_tensor([weight])])
    total = hvd.allreduce(packed, op=hvd.Sum, name=name, process_set=process_set)
    check_total(float(total[-1]))
    mean = (total[:-1] / total[-1]).reshape(tensor.shape)
    return mean if isinstance(value, torch.Tensor) else float(mean)


def evaluate(
    measure: Callable[[Batch], Mapping[str, float]],
    loader: Iterable[Batch],
    process_set: Any = hvd.global_process_set,
) -> dict[str, float]:
    """Means of ``measure`` over the samples of all ranks' loaders; every rank calls it.

    >>> loader = DataLoader(test_set, batch_size=100, sampler=hvd.ShardSampler(test_set))
    >>> with optimizer.authoritative(), torch.no_grad():
    ...     result = hvd.evaluate(lambda batch: {"accuracy": accuracy(model, *batch)}, loader)
    >>> 0 <= result["accuracy"] <= 1
    True

    Args:
        measure: Means over the samples of one batch, by name; the same names on every rank.
        loader: This rank's batches; ranks may have different numbers of them, or none.
        process_set: The ranks that take part.

    Raises:
        ValueError: no rank had a sample.
    """
    return mean_over_samples(
        measure, loader, count_samples, lambda part: gather_objects(part, "horovod_abs.evaluate", process_set)
    )


def gather_objects(thing: Any, name: str, process_set: Any = hvd.global_process_set) -> list[Any]:
    """``thing`` of every rank of a process set, which Horovod's ``allgather_object`` cannot; every rank calls it.

    Args:
        thing: Anything that can be pickled.
        name: Name of the exchange, the same on every rank.
        process_set: The ranks that take part.
    """
    pickled = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
    sizes = hvd.allgather(torch.tensor([len(pickled)]), name=f"{name}.sizes", process_set=process_set)
    everything = hvd.allgather(pickled, name=f"{name}.things", process_set=process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(everything, sizes.tolist())]


class ShardSampler(Sampler[int]):
    """Every ``size``-th sample from ``rank`` on: all ranks together evaluate each exactly once, without padding.

    >>> list(hvd.ShardSampler(range(4))) if hvd.size() == 1 else [0, 1, 2, 3]
    [0, 1, 2, 3]

    Args:
        dataset: The data set, with a length.
        process_set: The ranks that divide it.
    """

    def __init__(self, dataset: Sized, process_set: Any = hvd.global_process_set) -> None:
        self._indices = range(process_set.rank(), len(dataset), process_set.size())

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def average_buffers(model: torch.nn.Module, optimizer: Any) -> None:
    """Average the model's buffers (BatchNorm statistics) over ranks, weighted by the ledger; every rank calls it.

    A rank weighs as many samples as it contributed since the last call. Counters (buffers of whole numbers) are
    taken over from the first rank. Call it with nothing pending, e.g. before evaluation.

    >>> hvd.average_buffers(model, optimizer)

    Args:
        model: The model, the same on every rank.
        optimizer: Made by ``DistributedOptimizer``.
    """
    rounds = rounds_of(optimizer)
    share = rounds.share_since_averaged()
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    counters = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    if statistics:
        flat = torch.cat([buffer.detach().reshape(-1).to(torch.float64) for buffer in statistics])
        flat = flat * share if share else torch.zeros_like(flat)
        rounds.wire.finish(rounds.wire.sum_([flat], f"{rounds.name}.buffers"))
        with torch.no_grad():
            parts = torch.split(flat, [buffer.numel() for buffer in statistics])
            for buffer, part in zip(statistics, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
    rounds.wire.broadcast_(counters, f"{rounds.name}.counters")
