"""Non-blocking sums over ranks, through Horovod.

Horovod has no handles for TensorFlow. A function compiled once, run by a thread of its own, is one: the thread waits
in the operation while the program computes on. Horovod knows an operation by its name in the graph, so every exchange
is submitted by the same top-level function of the same thread.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_abs import shutdown
from horovod_abs.errors import ExchangeFailed, ExchangeTimeout

Tensors = list[tf.Tensor]


class Wire(Protocol):
    """Sums tensors over ranks without blocking."""

    rank: int
    size: int

    def start_sum(self, tensors: Tensors, name: str) -> Future[Tensors]:
        """Start to sum ``tensors`` over all ranks."""

    def finish(self, sums: Future[Tensors]) -> Tensors:
        """Wait for the sums. Raises :class:`ExchangeFailed` if they could not be carried out."""

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        """The tensors of one rank (of the world), by default the first; every rank calls it."""

    def gather(self, values: list[int], name: str, timeout: float) -> list[list[int]]:
        """The values of every rank, in order of ranks; every rank calls it, with as many values.

        Raises:
            ExchangeTimeout: not every rank came within ``timeout`` seconds.
        """


class HorovodWire:
    """Sums over a Horovod process set."""

    def __init__(self, process_set: Any) -> None:
        self.process_set = process_set
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._submitter = Submitter()

    def start_sum(self, tensors: Tensors, name: str) -> Future[Tensors]:
        def sums(*given: tf.Tensor) -> Any:
            return hvd.grouped_allreduce(list(given), op=hvd.Sum, name=name, **self._options)

        return self._submitter.submit(self._compile(sums, name, tensors), *tensors)

    def finish(self, sums: Future[Tensors]) -> Tensors:
        try:
            return list(sums.result())
        except tf.errors.OpError as error:
            raise self._failed("the exchange in flight", error) from error

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        root = (self.process_set.ranks or [0])[0] if root is None else root

        def broadcasts(*given: tf.Tensor) -> Any:
            return [
                hvd.broadcast(tensor, root, name=f"{name}.{index}", **self._options)
                for index, tensor in enumerate(given)
            ]

        return self.finish(self._submitter.submit(self._compile(broadcasts, f"{name}.{root}", tensors), *tensors))

    def gather(self, values: list[int], name: str, timeout: float) -> list[list[int]]:
        mine = tf.constant([values], dtype=tf.int64)

        def gathered(given: tf.Tensor) -> Any:
            return hvd.allgather(given, name=name, **self._options)

        everyone = self._submitter.submit(self._compile(gathered, name, [mine]), mine)
        deadline = time.monotonic() + timeout
        while not everyone.done():
            if time.monotonic() > deadline:
                shutdown.expect_no_answer()
                raise ExchangeTimeout(
                    self.rank,
                    f"not every rank has come to {name!r} within {timeout:g} s",
                    "Make the same optimizers and begin the same epochs, in the same order, on every rank",
                )
            time.sleep(0.001)
        try:
            rows: list[list[int]] = everyone.result().numpy().tolist()
        except tf.errors.OpError as error:
            raise self._failed(name, error) from error
        return rows

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

    def _failed(self, what: str, error: Exception) -> ExchangeFailed:
        return ExchangeFailed(
            self.rank,
            f"Horovod could not carry out {what} ({' '.join(str(error).split())})",
            "As a rule another rank has raised or died: look for the first error in the other ranks' output",
        )


class LocalWire:
    """A single process that takes part in no exchange: every sum is complete at once."""

    rank = 0
    size = 1

    def start_sum(self, tensors: Tensors, name: str) -> Future[Tensors]:
        done: Future[Tensors] = Future()
        done.set_result(tensors)
        return done

    def finish(self, sums: Future[Tensors]) -> Tensors:
        return sums.result()

    def broadcast(self, tensors: Tensors, name: str, root: int | None = None) -> Tensors:
        return tensors

    def gather(self, values: list[int], name: str, timeout: float) -> list[list[int]]:
        return [values]


def open_wire(process_set: Any) -> Wire:
    """The wire over ``process_set``, or a local one for a process that is not part of it."""
    return HorovodWire(process_set) if process_set.included() else LocalWire()


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
