"""Non-blocking sums over ranks, through Horovod.

Horovod has no handles for TensorFlow. A function compiled once, run by a thread of its own, is one: the thread waits
in the operation while the program computes on. Horovod knows an operation by its name in the graph, so every exchange
is submitted by the same top-level function of the same thread.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_abs import shutdown
from horovod_abs.errors import failed, late

Tensors = list[tf.Tensor]
Prepare = Callable[[Tensors], Tensors]


def _as_they_are(tensors: Tensors) -> Tensors:
    return tensors


class Wire(Protocol):
    """Sums tensors over ranks without blocking."""

    rank: int
    size: int

    def start_sum(self, tensors: Tensors, name: str, before: Prepare = _as_they_are) -> Future[Tensors]:
        """Start to sum over all ranks what ``before`` makes of some tensors, always the same for a name; traced."""

    def finish(self, sums: Future[Tensors]) -> Tensors:
        """Wait for the sums.

        Raises:
            ExchangeFailed: they could not be carried out.
            ExchangeTimeout: not every rank came in time.
        """

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        """The tensors of one rank (of the world), by default the first; every rank calls it.

        Raises:
            ExchangeTimeout: not every rank came in time.
        """

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        """The values of every rank, in order of ranks; every rank calls it, with as many values.

        Raises:
            ExchangeTimeout: not every rank came in time.
        """


class HorovodWire:
    """Sums over a Horovod process set.

    Args:
        process_set: Horovod's.
        timeout: Seconds to wait for the other ranks in an exchange.
    """

    def __init__(self, process_set: Any, timeout: float = 60.0) -> None:
        self.process_set = process_set
        self.timeout = timeout
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._submitter = Submitter()

    def start_sum(self, tensors: Tensors, name: str, before: Prepare = _as_they_are) -> Future[Tensors]:
        def sums(*tensors: tf.Tensor) -> Any:
            given = before(list(tensors))
            result: list[Any] = [None] * len(given)
            for dtype in dict.fromkeys(tensor.dtype for tensor in given):  # an operation takes tensors of one type
                places = [place for place, tensor in enumerate(given) if tensor.dtype == dtype]
                group = [given[place] for place in places]
                summed = hvd.grouped_allreduce(group, op=hvd.Sum, name=f"{name}.{dtype.name}", **self._options)
                for place, tensor in zip(places, summed, strict=True):
                    result[place] = tensor
            return result

        return self._submitter.submit(self._compile(sums, name, tensors), *tensors)

    def finish(self, sums: Future[Tensors]) -> Tensors:
        return list(self._finish(sums, "the exchange in flight"))

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        root = (self.process_set.ranks or [0])[0] if root is None else root

        def broadcasts(*given: tf.Tensor) -> Any:
            return [
                hvd.broadcast(tensor, root, name=f"{name}.{index}", **self._options)
                for index, tensor in enumerate(given)
            ]

        values = self._submitter.submit(self._compile(broadcasts, f"{name}.{root}", tensors), *tensors)
        return list(self._finish(values, name))

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        mine = tf.constant([values], dtype=tf.int64)

        def gathered(given: tf.Tensor) -> Any:
            return hvd.allgather(given, name=name, **self._options)

        everyone = self._submitter.submit(self._compile(gathered, name, [mine]), mine)
        rows: list[list[int]] = self._finish(everyone, name).numpy().tolist()
        return rows

    def _finish(self, future: Future[Any], name: str) -> Any:
        concurrent.futures.wait([future], self.timeout)
        if not future.done():
            shutdown.expect_no_answer()
            raise late(self.rank, name, self.timeout)
        try:
            return future.result()
        except tf.errors.OpError as error:
            raise failed(self.rank, name, error) from error

    @property
    def _options(self) -> dict[str, Any]:
        return {"ignore_name_scope": True, "process_set": self.process_set}

    def _compile(self, function: Callable[..., Any], name: str, tensors: Tensors) -> Callable[..., Any]:
        """The function for tensors of these shapes and types, traced here and not in the submitting thread."""
        key = (name, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        if key not in self._compiled:
            with tf.init_scope():
                specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
                self._compiled[key] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._compiled[key]


class LocalWire:
    """A single process that takes part in no exchange: every sum is complete at once."""

    rank = 0
    size = 1

    def start_sum(self, tensors: Tensors, name: str, before: Prepare = _as_they_are) -> Future[Tensors]:
        done: Future[Tensors] = Future()
        done.set_result(before(tensors))
        return done

    def finish(self, sums: Future[Tensors]) -> Tensors:
        return sums.result()

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        return tensors

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        return [values]


def open_wire(process_set: Any, timeout: float = 60.0) -> Wire:
    """The wire over ``process_set``, or a local one for a process that is not part of it."""
    return HorovodWire(process_set, timeout) if process_set.included() else LocalWire()


class Submitter:
    """Calls functions one after the other in a thread of its own.

    Unlike that of a thread pool, the thread never keeps the process from ending: it may wait for a rank that is gone.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="horovod_abs").start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a function called, and return what will hold its result."""
        result: Future[Any] = Future()
        self._jobs.put((result, function, arguments))
        return result


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    for result, function, arguments in iter(jobs.get, None):
        _call(result, function, arguments)


def _call(result: Future[Any], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        result.set_result(function(*arguments))
    except BaseException as error:
        result.set_exception(error)
