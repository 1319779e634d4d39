"""What each rank of the network benchmark runs: how many numbers and repeats, a label, and a file for rank 0."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import horovod_abs.torch as hvd
from horovod_abs.observe.progress import open_bar
from horovod_abs.torch.functions import gather_objects

WARM_UP = 2
"""Exchanges of each kind before those that count: connections are made, and caches filled."""
PARTS = 4
"""Tensors that the numbers are cut into, to see what that costs or gains."""
_POLL_SECONDS = 0.0003
_CHUNK = 2**18
_MICRO_BATCHES = 30
"""To measure computing alone."""

Advance = Callable[[], object]


class Exchange:
    """Sums tensors and a small ledger over ranks, as the payloads do, and waits without taking the processor.

    Args:
        name: Of the exchange, the same on every rank.
        tensors: What is summed, in place.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._name = name
        self._tensors = [*tensors, torch.zeros(64 * hvd.size(), dtype=torch.float64)]
        self._handle = 0

    def launch(self) -> None:
        """Start to sum."""
        self._handle = hvd.grouped_allreduce_async_(self._tensors, op=hvd.Sum, name=self._name)

    def poll(self) -> bool:
        """Whether it is complete."""
        return bool(hvd.poll(self._handle))

    def finish(self) -> None:
        """Wait for it."""
        while not self.poll():
            time.sleep(_POLL_SECONDS)
        hvd.synchronize(self._handle)

    def timed(self, repeats: int, advance: Advance) -> tuple[list[tuple[float, float]], float]:
        """When each of some exchanges began and ended here, and their mean processor seconds; :data:`WARM_UP` aside."""
        times, processor = [], []
        for repeat in range(-WARM_UP, repeats):
            hvd.barrier()
            began, used = time.perf_counter(), time.process_time()
            self.launch()
            self.finish()
            if repeat >= 0:
                times.append((began, time.perf_counter()))
                processor.append(time.process_time() - used)
            advance()
        return times, mean(processor)


class MicroBatch:
    """A forward and backward pass that really computes, some milliseconds long, in the processor's caches."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self._samples = torch.randn(128, 256)
        self.seconds: list[float] = []

    def compute(self) -> None:
        """Compute one, and note its seconds."""
        began = time.perf_counter()
        self._model(self._samples).square().mean().backward()
        self.seconds.append(time.perf_counter() - began)


def computing(exchange: Exchange, repeats: int, advance: Advance) -> tuple[float, float, float]:
    """All ranks compute all the time: mean seconds of a micro-batch, of one beside an exchange, and of the exchange."""
    alone, beside, seconds = MicroBatch(), MicroBatch(), []
    for _ in range(_MICRO_BATCHES):
        MicroBatch().compute()
    for _ in range(repeats):
        hvd.barrier()
        for _ in range(_MICRO_BATCHES):
            alone.compute()
        hvd.barrier()
        began = time.perf_counter()
        exchange.launch()
        while not exchange.poll():
            beside.compute()
        exchange.finish()
        seconds.append(time.perf_counter() - began)
        advance()
    return mean(alone.seconds), mean(beside.seconds), mean(seconds)


def around_the_ring(numbers: int) -> float:
    """Seconds that plain sockets take to send what a ring sends: each rank to the next one, all at the same time."""
    size, rank = hvd.size(), hvd.rank()
    total = 2 * (size - 1) * 4 * numbers // size
    with socket.create_server(("", 0)) as server:
        addresses = gather_objects((socket.gethostname(), server.getsockname()[1]), "addresses")
        with socket.create_connection(addresses[(rank + 1) % size]) as out, server.accept()[0] as into:
            hvd.barrier()
            began = time.perf_counter()
            with ThreadPoolExecutor(1) as sender:
                sent = sender.submit(_send, out, total)
                _receive(into, total)
                sent.result()
            return time.perf_counter() - began


def _send(out: socket.socket, total: int) -> None:
    chunk = bytes(_CHUNK)
    for begin in range(0, total, _CHUNK):
        out.sendall(chunk[: total - begin])


def _receive(into: socket.socket, total: int) -> None:
    chunk = bytearray(_CHUNK)
    while total:
        total -= into.recv_into(chunk, min(_CHUNK, total))


def _seconds(times: list[tuple[float, float]], name: str) -> list[float]:
    """From the last rank's launch of each exchange until all have it; the hosts have one clock."""
    together = zip(*gather_objects(times, name), strict=True)
    return [max(end for _, end in each) - max(begin for begin, _ in each) for each in together]


def main() -> None:
    """Measure; rank 0 writes the result."""
    numbers, repeats, label, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    hvd.init()
    torch.set_num_threads(1)
    flat = torch.zeros(numbers)
    kinds = {"float32": [flat], "parts": list(flat.chunk(PARTS)), "float16": [flat.half()]}
    result: dict[str, Any] = {"seconds": {}}
    with open_bar((len(kinds) + 1) * repeats + len(kinds) * WARM_UP, enabled=hvd.rank() == 0) as bar:
        bar.set_description_str(f"{label} ", refresh=False)
        exchanges = {kind: Exchange(f"network.{kind}", tensors) for kind, tensors in kinds.items()}
        for kind, exchange in exchanges.items():
            times, processor = exchange.timed(repeats, lambda: bar.update(1))
            result["seconds"][kind] = _seconds(times, kind)
            if kind == "float32":
                result["processor_seconds"] = mean(gather_objects(processor, "processor"))
        result["sockets"] = max(gather_objects(around_the_ring(numbers), "sockets"))
        own = computing(exchanges["float32"], repeats, lambda: bar.update(1))
    names = ("micro_batch_alone", "micro_batch_beside", "exchange_beside")
    means = [mean(each) for each in zip(*gather_objects(own, "computing"), strict=True)]
    if hvd.rank() == 0:
        path.write_text(json.dumps({**result, **dict(zip(names, means, strict=True))}))


if __name__ == "__main__":
    main()
