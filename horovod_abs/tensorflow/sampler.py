"""``adaptive_dataset``: every sample of a data set exactly once an epoch, by whichever rank has time for it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_abs.core.allocation import Loading
from horovod_abs.epochs import SharedEpochs
from horovod_abs.rounds import rounds_of
from horovod_abs.tensorflow.wire import Submitter

Batch = Any
Loaded = tuple[list[int], "Future[Batch]"]


def adaptive_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    optimizer: Any,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    prefetch: int = 2,
) -> tf.data.Dataset:
    """A data set for ``model.fit`` or ``optimizer.epoch``, of which each rank draws as much as it has time for.

    >>> model.compile(optimizer, "sparse_categorical_crossentropy")
    >>> data = hvd.adaptive_dataset(x, y, optimizer=optimizer, batch_size=16)
    >>> history = model.fit(data, epochs=3, verbose=0, callbacks=hvd.callbacks.wrap([]))
    >>> optimizer.samples_seen == 3 * len(x)  # every sample once an epoch, whoever drew it
    True

    All ranks together draw every sample exactly once an epoch. How many a rank draws follows from its speed, which all
    ranks know from the ledger. The data set looks longer than any rank's part is; the epoch ends with the callback.
    Transformations that work batch by batch (``map``) may follow it; such as read ahead (``prefetch``, parallel
    ``map``) may not, for only the training loop knows which samples come next. A thread loads ahead by itself.

    Args:
        x: An array, tensor, or structure of them with the samples along the first axis; or, without ``y``, anything
            with a length whose items are samples. The same on every rank.
        y: Targets, as ``x``.
        sample_weight: Weights, as ``x``.
        optimizer: Made by ``DistributedOptimizer``.
        batch_size: Samples in a micro-batch of this rank; ranks may differ.
        shuffle: Go through the data in a new random order in each epoch.
        seed: Of the random order; the same on every rank.
        prefetch: Batches that are loaded ahead.

    Raises:
        ValueError: an empty data set, parts of different length, or a number out of range.
        TypeError: a data set without a length.
    """
    if batch_size < 1 or prefetch < 0:
        raise ValueError(f"need batch_size >= 1 and prefetch >= 0, got {batch_size} and {prefetch}")
    take, length = source(x, y, sample_weight)
    sampler = AdaptiveSampler(take, length, optimizer, batch_size, prefetch, shuffle, seed)
    return sampler.dataset()


def source(x: Any, y: Any = None, sample_weight: Any = None) -> tuple[Callable[[Sequence[int]], Batch], int]:
    """What makes a batch of samples with some indices, and how many samples there are."""
    if y is None and sample_weight is None and not _is_arrays(x):
        if not hasattr(x, "__getitem__"):
            raise TypeError(f"{type(x).__name__} has no items: give arrays, or something with a length and items")
        return lambda indices: _stacked([x[index] for index in indices]), len(x)
    if sample_weight is not None:
        given: Any = (x, y, sample_weight)
    else:
        given = x if y is None else (x, y)
    arrays = keras.tree.map_structure(np.asarray, given)
    lengths = {len(array) for array in keras.tree.flatten(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"the parts of the data set have different lengths: {sorted(lengths)}")
    return lambda indices: keras.tree.map_structure(lambda array: array[indices], arrays), lengths.pop()


def _is_arrays(x: Any) -> bool:
    return all(isinstance(part, np.ndarray | tf.Tensor) for part in keras.tree.flatten(x))


def _stacked(samples: list[Any]) -> Batch:
    return keras.tree.map_structure(lambda *parts: np.stack(parts), *samples)


class AdaptiveSampler:
    """This rank's part in the epochs of an adaptive data set.

    Args:
        take: Makes a batch of samples with some indices.
        length: Samples in the data set.
        optimizer: The distributed optimizer.
        batch: Samples in a micro-batch.
        prefetch: Batches that are loaded ahead.
        shuffle, seed: See :func:`adaptive_dataset`.

    Attributes:
        epochs: Hands out the indices.
    """

    def __init__(
        self,
        take: Callable[[Sequence[int]], Batch],
        length: int,
        optimizer: Any,
        batch: int,
        prefetch: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        rounds = rounds_of(optimizer)
        name = f"sampler.{len(rounds.samplers)}"
        self.epochs = SharedEpochs(
            length,
            rounds.driver,
            lambda values: rounds.gather(values, name),
            shuffle=shuffle,
            seed=seed,
            number=len(rounds.samplers),
        )
        self._take = take
        self._length = length
        self._batch = batch
        self._prefetch = prefetch
        self._loader = Submitter()
        self._ready: deque[Future[Batch]] = deque()
        self._feeding = threading.Event()
        rounds.samplers.append(self)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way or comes next."""
        return self.epochs.epoch

    @property
    def steps(self) -> int:
        """Micro-batches of this rank's size in the data set."""
        return math.ceil(self._length / self._batch)

    # -- for optimizer.epoch and for model.fit ---------------------------------------------------------------------

    def loaded(self) -> Iterator[tuple[int, Future[Batch]]]:
        """This rank's batches of one epoch, as they are being loaded, with their number of samples."""
        for indices, batch in self.epochs.batches(Loading(self._batch, self._prefetch * self._batch), self._load):
            yield len(indices), batch

    def batches(self) -> Iterator[Batch]:
        """This rank's batches of one epoch, as tensors."""
        for _, batch in self.loaded():
            yield keras.tree.map_structure(tf.convert_to_tensor, batch.result())

    def _load(self) -> Iterator[Loaded]:
        """Loads ahead, as many batches as were asked for."""
        ahead: deque[Loaded] = deque()
        chunk: list[int] = []
        for index in self.epochs.indices():
            chunk.append(index)
            if len(chunk) == self._batch:
                ahead.append((chunk, self._loader.submit(self._take, chunk)))
                chunk = []
            if len(ahead) > self._prefetch:
                yield ahead.popleft()
        if chunk:
            ahead.append((chunk, self._loader.submit(self._take, chunk)))
        yield from ahead

    # -- for model.fit: Keras asks for a batch when the callback has put it there -----------------------------------

    def feed(self, batch: Future[Batch]) -> None:
        """Let Keras have a batch next.

        Raises:
            RuntimeError: it has not taken the one before.
        """
        self._feeding.set()
        if self._ready:
            raise RuntimeError(
                "model.fit does not read the adaptive_dataset that was made last for its optimizer: hand it to fit, "
                "or name the right one with hvd.callbacks.RoundsCallback(data=…)"
            )
        self._ready.append(batch)

    def stop_feeding(self) -> None:
        """The epoch is over; Keras may look at a batch to build a model."""
        self._feeding.clear()
        self._ready.clear()

    def dataset(self) -> tf.data.Dataset:
        """The data set for Keras."""
        example = self._take([0])
        signature = keras.tree.map_structure(
            lambda part: tf.TensorSpec((None, *np.shape(part)[1:]), np.asarray(part).dtype), example
        )
        data = tf.data.Dataset.from_generator(self._generate, output_signature=signature)
        # One more than any rank can draw: the callback, and not Keras, is to end the epoch.
        data = data.apply(tf.data.experimental.assert_cardinality(self.steps + 1))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        data = data.with_options(options)
        data.horovod_abs_sampler = self
        return data

    def _generate(self) -> Iterator[Batch]:
        while True:
            if not self._feeding.is_set():  # Keras looks at a batch before it trains, to build the model
                yield self._take(range(min(self._batch, self._length)))
            elif self._ready:
                yield self._ready.popleft().result()
            else:
                raise RuntimeError(
                    "the adaptive_dataset was read ahead: leave out prefetch() and parallel map() behind it, it loads "
                    "ahead by itself"
                )

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Which epoch it is, and what has been used up in it; part of the optimizer's state."""
        return self.epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.epochs.load_state_dict(state)


def adaptive_sampler_of(batches: Any) -> AdaptiveSampler | None:
    """The adaptive sampler behind a data set, if there is one."""
    sampler: AdaptiveSampler | None = getattr(batches, "horovod_abs_sampler", None)
    return sampler
