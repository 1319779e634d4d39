"""Collectives that take Keras's variables, and averages that are exact although ranks see unlike numbers of samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_abs.averages import Batch, check_total, check_weight, mean_over_samples
from horovod_abs.rounds import rounds_of
from horovod_abs.tensorflow.data import count_samples
from horovod_abs.tensorflow.flat import native
from horovod_abs.tensorflow.wire import Wire, open_wire

_wires: dict[int, Wire] = {}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> None:
    """Give the ranks the values that one of them has, of TensorFlow's or of Keras's variables.

    Horovod's own knows Keras's variables neither themselves nor by names that are the same on all ranks; here they
    travel by their order.

    Args:
        variables: In the same order on every rank, e.g. ``[*model.variables, *optimizer.variables]``.
        root_rank: The rank whose values all take over.
        process_set: The ranks that take part.
        inplace: Has no effect: a copy lives until the broadcast is over.
    """
    plain = [native(variable) for variable in variables]
    number = process_set.process_set_id
    if number not in _wires:
        _wires[number] = open_wire(process_set)
    wire = _wires[number]
    values = wire.broadcast([variable.read_value() for variable in plain], f"horovod_abs.variables.{number}", root_rank)
    for variable, value in zip(plain, values, strict=True):
        variable.assign(value)


def average(value: Any, weight: float = 1.0, name: str | None = None, process_set: Any = hvd.global_process_set) -> Any:
    """Mean of ``value`` over ranks, each with its ``weight``; every rank calls it, eagerly.

    Args:
        value: A number, or a tensor or array of the same shape on every rank.
        weight: This rank's weight, e.g. the number of samples that ``value`` is a mean over. A rank with weight 0
            takes part and its value does not count, not even if it is NaN.
        name: Name of the exchange, the same on every rank.
        process_set: The ranks that take part.

    Returns:
        The mean, in float64: a float for a number, a tensor for a tensor or an array.

    Raises:
        ValueError: a negative weight, or weights that are all 0.
    """
    check_weight(weight)
    tensor = tf.cast(tf.convert_to_tensor(value), tf.float64)
    weighted = tensor * weight if weight else tf.zeros_like(tensor)
    packed = tf.concat([tf.reshape(weighted, [-1]), [tf.constant(weight, tf.float64)]], 0)
    total = hvd.allreduce(packed, op=hvd.Sum, name=name or "horovod_abs.average", process_set=process_set)
    check_total(float(total[-1]))
    mean = tf.reshape(total[:-1] / total[-1], tensor.shape)
    return float(mean) if isinstance(value, int | float) else mean


def evaluate(
    measure: Callable[[Batch], Mapping[str, Any]],
    batches: Iterable[Batch],
    process_set: Any = hvd.global_process_set,
) -> dict[str, float]:
    """Means of ``measure`` over the samples of all ranks' batches; every rank calls it.

    >>> test = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank()).batch(100)
    >>> with optimizer.authoritative():
    ...     result = hvd.evaluate(lambda batch: {"accuracy": accuracy(model, *batch)}, test)
    >>> 0 <= result["accuracy"] <= 1
    True

    Args:
        measure: Means over the samples of one batch, by name; the same names on every rank.
        batches: This rank's batches; ranks may have different numbers of them, or none.
        process_set: The ranks that take part.

    Raises:
        ValueError: no rank had a sample.
    """
    return mean_over_samples(
        measure, batches, count_samples, lambda part: gather_objects(part, "horovod_abs.evaluate", process_set)
    )


def gather_objects(thing: Any, name: str, process_set: Any = hvd.global_process_set) -> list[Any]:
    """``thing`` of every rank of a process set; every rank calls it.

    Args:
        thing: Anything that can be pickled.
        name: Name of the exchange, the same on every rank.
        process_set: The ranks that take part.
    """
    pickled = np.frombuffer(pickle.dumps(thing), dtype=np.uint8)
    sizes = hvd.allgather(tf.constant([len(pickled)]), name=f"{name}.sizes", process_set=process_set).numpy()
    everything = hvd.allgather(tf.constant(pickled), name=f"{name}.things", process_set=process_set).numpy()
    return [pickle.loads(part.tobytes()) for part in np.split(everything, np.cumsum(sizes)[:-1])]


def average_buffers(model: keras.Model, optimizer: Any) -> None:
    """Average what the model keeps without training it (BatchNormalization's statistics) over ranks.

    A rank weighs as many samples as it contributed since the last call. Counters (whole numbers) are taken over from
    the first rank; the states of random generators stay each rank's own. Every rank calls it, with nothing pending,
    e.g. before evaluation; ``model.fit`` with one of ``hvd.callbacks`` does at the end of each epoch.

    Args:
        model: The model, the same on every rank.
        optimizer: Made by ``DistributedOptimizer``.
    """
    rounds = rounds_of(optimizer)
    share = rounds.share_since_averaged()
    metrics = {native(variable).ref() for metric in model.metrics for variable in metric.variables}
    kept = [native(variable) for variable in model.non_trainable_variables if not is_random(variable)]
    kept = [variable for variable in kept if variable.ref() not in metrics]
    statistics = [variable for variable in kept if variable.dtype.is_floating]
    counters = [variable for variable in kept if not variable.dtype.is_floating]
    if statistics:
        flat = tf.concat([tf.cast(tf.reshape(variable, [-1]), tf.float64) for variable in statistics], 0)
        flat = flat * share if share else tf.zeros_like(flat)
        (mean,) = rounds.wire.finish(rounds.wire.start_sum([flat], f"{rounds.name}.buffers"))
        sizes = [variable.shape.num_elements() for variable in statistics]
        for variable, part in zip(statistics, tf.split(mean, sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
    if counters:
        values = rounds.wire.broadcast([variable.read_value() for variable in counters], f"{rounds.name}.counters")
        for variable, value in zip(counters, values, strict=True):
            variable.assign(value)


def SyncBatchNormalization(*_: Any, **__: Any) -> NoReturn:  # noqa: N802  (Horovod's name)
    """Horovod's layer, which Keras 3 cannot make, is refused: raises :class:`ValueError`."""
    raise ValueError(
        "SyncBatchNormalization waits for all ranks in every forward pass, but here ranks do different numbers of "
        "them. Use BatchNormalization, GroupNormalization or LayerNormalization"
    )


def is_random(variable: Any) -> bool:
    """Whether a variable of Keras's holds the state of a random generator, as ``Dropout`` has one."""
    return bool(variable.name == "seed_generator_state")
