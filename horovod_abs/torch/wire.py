"""Non-blocking sums over ranks, through Horovod."""

from __future__ import annotations

import time
from typing import Any, Protocol

import horovod.torch as hvd
import torch

from horovod_abs import shutdown
from horovod_abs.errors import failed, late


class Wire(Protocol):
    """Sums tensors over ranks, in place, without blocking."""

    rank: int
    size: int
    takes_threads: bool
    """Whether sums may be started in another thread than the one that looks whether they are complete."""

    def sum_(self, tensors: list[torch.Tensor], name: str) -> int:
        """Start to sum ``tensors`` over all ranks; returns a handle."""

    def poll(self, handle: int) -> bool:
        """Whether the sum is complete."""

    def finish(self, handle: int) -> None:
        """Wait for the sum.

        Raises:
            ExchangeFailed: it could not be carried out.
            ExchangeTimeout: not every rank came in time.
        """

    def broadcast_(self, tensors: list[torch.Tensor], name: str) -> None:
        """Overwrite ``tensors`` with those of the first rank; every rank calls it.

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

    takes_threads = True

    def __init__(self, process_set: Any, timeout: float = 60.0) -> None:
        self.process_set = process_set
        self.timeout = timeout
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()

    def sum_(self, tensors: list[torch.Tensor], name: str) -> int:
        try:
            return int(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name=name, process_set=self.process_set))
        except hvd.HorovodInternalError as error:
            raise failed(self.rank, name, error) from error

    def poll(self, handle: int) -> bool:
        return bool(hvd.poll(handle))

    def finish(self, handle: int) -> None:
        self._finish(handle, "the exchange in flight")

    def broadcast_(self, tensors: list[torch.Tensor], name: str) -> None:
        root = (self.process_set.ranks or [0])[0]
        try:
            handles = [
                hvd.broadcast_async_(tensor, root, name=f"{name}.{index}", process_set=self.process_set)
                for index, tensor in enumerate(tensors)
            ]
        except hvd.HorovodInternalError as error:
            raise failed(self.rank, name, error) from error
        for handle in handles:
            self._finish(handle, name)

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        handle = hvd.allgather_async(torch.tensor([values]), name=name, process_set=self.process_set)
        gathered: list[list[int]] = self._finish(handle, name).tolist()
        return gathered

    def _finish(self, handle: int, name: str) -> Any:
        deadline = time.monotonic() + self.timeout
        while not hvd.poll(handle):
            if time.monotonic() > deadline:
                shutdown.expect_no_answer()
                raise late(self.rank, name, self.timeout)
            time.sleep(0.001)
        try:
            return hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            raise failed(self.rank, name, error) from error


class LocalWire:
    """A single process that takes part in no exchange: every sum is complete at once."""

    rank = 0
    size = 1
    takes_threads = False

    def sum_(self, tensors: list[torch.Tensor], name: str) -> int:
        return 0

    def poll(self, handle: int) -> bool:
        return True

    def finish(self, handle: int) -> None:
        pass

    def broadcast_(self, tensors: list[torch.Tensor], name: str) -> None:
        pass

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        return [values]


def open_wire(process_set: Any, timeout: float = 60.0) -> Wire:
    """The wire over ``process_set``, or a local one for a process that is not part of it."""
    return HorovodWire(process_set, timeout) if process_set.included() else LocalWire()
