"""One rank of a launch that is to go wrong.

    horovodrun -np 3 python -m tests.torch.failures CASE

Each case trains a small model until rank 1 does something that no run survives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import horovod_abs.torch as hvd
from tests.torch.scenario import small_model, wrap

BEFORE = 20
"""Micro-batches of rank 1 before it fails."""


def _train(fail: Callable[[], None], **options: object) -> None:
    """An endless epoch, in which rank 1 fails."""
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), max_micro_batches=8, **options)
    hvd.barrier()
    data = torch.utils.data.DataLoader(torch.randn(64, 6, dtype=torch.float64), batch_size=4)
    for number, x in enumerate(optimizer.epoch(data, rounds=1_000_000)):
        model(x).mean().backward()
        time.sleep(0.005)
        optimizer.step()
        if hvd.rank() == 1 and number == BEFORE:
            print(f"rank 1 fails at {time.time()}", flush=True)
            fail()


def frozen() -> None:
    """Rank 1 stops, and never answers again."""
    _train(lambda: os.kill(os.getpid(), signal.SIGSTOP), exchange_timeout=3.0)


def killed() -> None:
    """Rank 1 dies."""
    _train(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raising() -> None:
    """Rank 1's program has a fault; the other ranks go on to other things, which they never come to do."""

    def fail() -> None:
        raise KeyError("a fault of the user's")

    _train(fail)
    hvd.allreduce(torch.zeros(1), name="after training")
    time.sleep(3600)


def enduring() -> None:
    """Nothing goes wrong by itself; training ends after 20 seconds. The exchange may take 12."""
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), exchange_timeout=12.0)
    hvd.barrier()
    began = time.monotonic()
    data = torch.utils.data.DataLoader(torch.randn(64, 6, dtype=torch.float64), batch_size=4)
    for number, x in enumerate(optimizer.epoch(data, rounds=1_000_000)):
        model(x).mean().backward()
        time.sleep(0.02)
        optimizer.step()
        if number == BEFORE:
            print(f"rank {hvd.rank()} is training", flush=True)
        if hvd.rank() == 0 and time.monotonic() - began > 20:
            break
    last = optimizer.last_round
    assert last is not None
    print(f"rank {hvd.rank()} ends after round {last.round}, longest {_longest(optimizer):.1f} s", flush=True)


def evaluating() -> None:
    """Rank 0 evaluates twice, in mid-epoch and between epochs, for as long as the command line says.

    The second number is the exchange's timeout; without it, the default.
    """
    seconds, timeout = float(sys.argv[2]), [float(number) for number in sys.argv[3:]]
    model = small_model()
    options = {"exchange_timeout": timeout[0]} if timeout else {}
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    data = torch.utils.data.DataLoader(torch.randn(64, 6, dtype=torch.float64), batch_size=4)

    def evaluate() -> None:
        if hvd.rank() == 0:
            with optimizer.authoritative(), torch.no_grad():
                time.sleep(seconds)

    for epoch in range(2):
        for number, x in enumerate(optimizer.epoch(data, rounds=50)):
            model(x).mean().backward()
            time.sleep(0.005)
            optimizer.step()
            if (epoch, number) == (0, BEFORE):
                evaluate()
        if epoch == 0:
            evaluate()
    print(f"rank {hvd.rank()} ends, longest {_longest(optimizer):.1f} s", flush=True)


def _longest(optimizer: Any) -> float:
    return max(record.exchange_seconds for record in optimizer.history)


def leaving() -> None:
    """Rank 1 ends its program in the middle of a loop without ``epoch``, where nobody expects it."""
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), max_micro_batches=8)
    for _ in range(BEFORE if hvd.rank() == 1 else 1_000_000):
        model(torch.randn(4, 6, dtype=torch.float64)).mean().backward()
        optimizer.step(samples=4)
    sys.exit("rank 1 leaves without synchronize()")


def uneven() -> None:
    """Ranks that make unlike numbers of optimizers, or of calls of ``synchronize()``."""
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), exchange_timeout=15.0)
    impatient = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), exchange_timeout=15.0)
    for each in (optimizer, impatient):
        model(torch.randn(4, 6, dtype=torch.float64)).mean().backward()
        each.step(samples=4)
        each.synchronize()
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(3600)
    impatient._rounds.driver._timeout = impatient._rounds.wire.timeout = 2.0
    try:
        impatient.synchronize()
    except hvd.ExchangeTimeout as error:
        print("synchronize:", error, flush=True)
    try:
        impatient.step(samples=1)
    except hvd.ExchangeFailed as error:
        print("step afterwards:", error, flush=True)
    wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), exchange_timeout=2.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    {case.__name__: case for case in (frozen, killed, raising, enduring, evaluating, leaving, uneven)}[sys.argv[1]]()
