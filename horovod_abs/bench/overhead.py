"""What ``step`` costs on one rank: time and memory, against PyTorch's own gradient accumulation.

Both sides train the same ResNet-18 (62 tensors, 11.2 M parameters) on micro-batches of 16 and update it once every
:data:`ROUND` micro-batches: ours with ``backward`` and ``step``, the exchange of one rank and the merge included; plain
PyTorch with ``backward`` into ``p.grad``, and its own ``step`` at the end of the round.

*Time.* Only the backward passes and steps are timed, not the forward passes. Micro-batches of the two sides alternate,
so that both see the same machine; the ratio is the median over rounds. One thread: a ratio, not a speed.

*Memory.* The peak of live tensor storages (:mod:`horovod_abs.bench.storages`) of each side, separately for its backward
passes and its steps; the larger difference, in units of the gradient's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from rich.table import Table
from torch import nn

import horovod_abs.torch as hvd
from horovod_abs import options
from horovod_abs.bench.resnet import ResNet18
from horovod_abs.bench.storages import LiveStorages
from horovod_abs.observe.progress import open_bar

MICRO_BATCH = 16
ROUND = 4
"""Micro-batches between two updates."""
_SIDE = 32
_WARMUP_ROUNDS = 2


class Side(Protocol):
    """One way to train."""

    model: nn.Module
    optimizer: Any

    def step(self, last: bool) -> None:
        """After each backward pass; ``last`` in its round or not."""

    def close(self) -> None:
        """At the end."""


class Plain:
    """PyTorch's own accumulation in ``p.grad``."""

    def __init__(self) -> None:
        self.model: nn.Module = ResNet18()
        self.optimizer = _sgd(self.model)

    def step(self, last: bool) -> None:
        """Update at the end of the round."""
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def close(self) -> None:
        """Nothing is pending."""


class Ours:
    """Our optimizer, on the same rounds, with an exchange as in :func:`horovod_abs.options.exchange`."""

    def __init__(self, exchange: str = "gradients") -> None:
        self.model: nn.Module = ResNet18()
        self.optimizer = hvd.DistributedOptimizer(
            _sgd(self.model),
            named_parameters=self.model.named_parameters(),
            exchange=options.exchange(exchange),
            clock=hvd.CountClock(ROUND),
        )

    def step(self, last: bool) -> None:
        """Tell the optimizer, which knows when the round ends."""
        self.optimizer.step(samples=MICRO_BATCH)

    def close(self) -> None:
        """Merge what is pending."""
        self.optimizer.synchronize()


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Memory:
    """Peaks of live storage beyond parameters, buffers and the optimizer's state, in units of the gradient's size.

    Attributes:
        backward: During backward passes, activations included.
        step: During steps.
    """

    backward: float
    step: float


def measure(rounds: int, exchange: str = "gradients") -> dict[str, Any]:
    """Measure both, on this process as the only rank.

    Args:
        rounds: Timed on each side.
        exchange: As in :func:`horovod_abs.options.exchange`.

    Returns:
        ``time_ratio``, ``extra_buffers``, and what they are made from.

    Raises:
        ValueError: ``rounds`` is not positive, or an unknown exchange.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    ours = functools.partial(Ours, exchange)
    hvd.init()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with open_bar(2 * ROUND * (rounds + 2 * _WARMUP_ROUNDS + 1)) as bar:
            memory = {"abs": peaks(ours, bar.update), "plain": peaks(Plain, bar.update)}
            seconds = time_rounds({"abs": ours(), "plain": Plain()}, rounds, bar.update)
    finally:
        torch.set_num_threads(threads)
    return report(seconds, memory)


def report(seconds: dict[str, list[float]], memory: dict[str, Memory]) -> dict[str, Any]:
    """The result as plain values.

    Args:
        seconds: For ``"abs"`` and ``"plain"`` the time of backward passes and steps, by round.
        memory: For both.
    """
    ours, plain = memory["abs"], memory["plain"]
    return {
        "time_ratio": median(a / b for a, b in zip(seconds["abs"], seconds["plain"], strict=True)),
        "extra_buffers": round(max(ours.backward - plain.backward, ours.step - plain.step), 3),
        "milliseconds_per_micro_batch": {name: 1e3 * median(times) / ROUND for name, times in seconds.items()},
        "peak_buffers": {name: {"backward": each.backward, "step": each.step} for name, each in memory.items()},
        "rounds": len(seconds["abs"]),
        "micro_batches_per_round": ROUND,
    }


def time_rounds(sides: dict[str, Side], rounds: int, advance: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of backward passes and steps in each round of each side; their micro-batches alternate."""
    images = _images()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_WARMUP_ROUNDS + rounds):
        spent = dict.fromkeys(sides, 0.0)
        for micro_batch in range(1, ROUND + 1):
            for name, side in sides.items():
                loss = _loss(side, images)
                began = perf_counter()
                loss.backward()
                side.step(micro_batch == ROUND)
                spent[name] += perf_counter() - began
                advance()
        for name, time in spent.items():
            seconds[name].append(time)
    for side in sides.values():
        side.close()
    return {name: times[_WARMUP_ROUNDS:] for name, times in seconds.items()}


def peaks(make_side: Callable[[], Side], advance: Callable[[], object]) -> Memory:
    """The peaks of one side in a round, its merge included, after a warm-up."""
    images = _images()
    with LiveStorages() as storages:
        before = storages.live
    side = make_side()
    for micro_batch in range(1, ROUND * _WARMUP_ROUNDS + 1):
        _loss(side, images).backward()
        side.step(micro_batch % ROUND == 0)
        advance()
    gradient = sum(parameter.nbytes for parameter in side.model.parameters())
    before += gradient + _bytes_of(side.model.buffers())
    before += sum(_bytes_of(state.values()) for state in side.optimizer.state.values())
    backward = step = 0
    with LiveStorages() as storages:
        for micro_batch in range(1, ROUND + 1):
            loss = _loss(side, images)
            storages.mark()
            loss.backward()
            backward = max(backward, storages.peak)
            storages.mark()
            side.step(micro_batch == ROUND)
            step = max(step, storages.peak)
            advance()
    side.close()
    return Memory((backward - before) / gradient, (step - before) / gradient)


def _images() -> torch.Tensor:
    return torch.randn(MICRO_BATCH, 3, _SIDE, _SIDE)


def _loss(side: Side, images: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, side.model(images).square().mean())


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def to_table(result: dict[str, Any]) -> Table:
    """:func:`report` for people."""
    table = Table(
        title="Overhead of step: ResNet-18, 62 tensors, 11.2 M parameters, micro-batch 16, one rank",
        caption=f"time ratio {result['time_ratio']:.3f}, extra memory {result['extra_buffers']:.2f} gradients",
    )
    for column in ("", "backward + step", "peak in backward", "peak in step"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in (("plain", "PyTorch's accumulation"), ("abs", "ABS-SGD")):
        peak = result["peak_buffers"][name]
        table.add_row(
            label,
            f"{result['milliseconds_per_micro_batch'][name]:.1f} ms",
            f"{peak['backward']:.2f} gradients",
            f"{peak['step']:.2f} gradients",
        )
    return table
