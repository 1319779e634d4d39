"""How well ``TargetBatchClock`` holds the global batch, and what it does when a rank's speed halves in mid-run.

Each rank runs the production engine, in virtual time (:mod:`horovod_abs.sim`), and nothing is computed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from horovod_abs.core.clocks import TargetBatchClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column
from horovod_abs.sim.cluster import Compute, Program, Synchronize, VirtualCluster

BATCH = 16
"""Samples in a micro-batch."""
SETTLED = 10
"""Rounds after a change in which the clock may still be learning."""
NEAR = 0.15
"""A round is near the target if it differs from it by no more than this part."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        samples: The target.
        micro_batches: Mean seconds of a micro-batch, by rank.
        slower: The rank that becomes half as fast.
        rounds: Rounds before it does, and as many after.
        exchange: Seconds of an exchange.
        jitter: Standard deviation of a micro-batch's time, as a part of it.
        tick: Seconds until a tick of rank 0's timer is seen by the others; ``None`` for local time, as under Gloo.
        seed: Of the jitter.

    Raises:
        ValueError: a number is out of range.
    """

    samples: float = 320.0
    micro_batches: tuple[float, ...] = (0.02, 0.02, 0.04, 0.08)
    slower: int = 1
    rounds: int = 200
    exchange: float = 0.01
    jitter: float = 0.05
    tick: float | None = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        TargetBatchClock(self.samples)
        if not self.micro_batches or min(*self.micro_batches, self.exchange) <= 0 or self.jitter < 0:
            raise ValueError(f"every time must be positive: {self}")
        if not 0 <= self.slower < len(self.micro_batches):
            raise ValueError(f"there is no rank {self.slower} to become slower")
        if self.rounds <= SETTLED:
            raise ValueError(f"rounds must be more than {SETTLED}, got {self.rounds}")


def measure(setting: Setting) -> dict[str, Any]:
    """The samples of each rank in each round, and how well the target was held; as plain values."""
    clock, size = TargetBatchClock(setting.samples), len(setting.micro_batches)
    engines = [Engine(size, clock, rank=rank, max_micro_batches=10_000) for rank in range(size)]

    def program(rank: int) -> Program:
        ledger, noise = engines[rank].ledger, random.Random(f"{setting.seed} {rank}")
        while ledger.rounds < 2 * setting.rounds:
            slower = rank == setting.slower and ledger.rounds >= setting.rounds
            seconds = setting.micro_batches[rank] * (2 if slower else 1)
            yield Compute(BATCH, seconds * max(0.2, noise.gauss(1, setting.jitter)))
        yield Synchronize()

    cluster = VirtualCluster(
        engines, [program(rank) for rank in range(size)], lambda _: setting.exchange, tick_seconds=setting.tick
    )
    cluster.run()
    by_rank = np.array([entry.column(Column.WEIGHT) for entry in cluster.entries[: 2 * setting.rounds]])
    before, after = by_rank[: setting.rounds].sum(1), by_rank[setting.rounds :].sum(1)
    return {
        "before": _held(before, setting.samples),
        "after": _held(after, setting.samples),
        "batches": by_rank.tolist(),
        "setting": asdict(setting),
    }


def _held(batches: np.ndarray, target: float) -> dict[str, float]:
    """How well the target was held once the clock had settled; of the first rounds, after which one all were near."""
    near = np.abs(batches / target - 1) <= NEAR
    settled = batches[SETTLED:]
    far = np.flatnonzero(~near[: 2 * SETTLED])
    return {
        "mean": float(settled.mean()),
        "deviation": float(settled.std()),
        "near": float(near[SETTLED:].mean()),
        "far_until": int(far[-1]) + 1 if len(far) else 0,
    }


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`measure` for people."""
    setting = result["setting"]
    table = Table(
        title=f"Global batch with TargetBatchClock({setting['samples']:g})",
        caption=f"micro-batches of {BATCH} in {', '.join(f'{s:g}' for s in setting['micro_batches'])} s; rank "
        f"{setting['slower']} becomes half as fast after {setting['rounds']} rounds",
    )
    for column in ("", "mean", "deviation", f"within {NEAR:.0%}", "far at first"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("before", "after"):
        held = result[name]
        far = f"{held['far_until']} rounds"
        table.add_row(name, f"{held['mean']:.1f}", f"{held['deviation']:.1f}", f"{held['near']:.1%}", far)
    return table


def draw(result: Mapping[str, Any]) -> Figure:
    """Each rank's samples by round, stacked, beside the histograms of the global batch before and after."""
    setting, by_rank = result["setting"], np.array(result["batches"])
    target, change = setting["samples"], setting["rounds"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = [f"rank {rank}" for rank in range(by_rank.shape[1])]
    left.stackplot(np.arange(len(by_rank)), by_rank.T, labels=names, step="post", alpha=0.8)
    left.axhline(target, color="black", linewidth=1)
    left.axvline(change, color="black", linestyle=":", linewidth=1)
    left.set(xlabel="round", ylabel="samples", title=f"rank {setting['slower']} becomes half as fast")
    left.margins(x=0)
    left.legend(loc="lower left", ncols=len(names), fontsize="small")
    bins = np.arange(target * (1 - 2 * NEAR), target * (1 + 2 * NEAR) + BATCH, BATCH) - BATCH / 2
    total = by_rank.sum(1)
    settled = [total[SETTLED:change], total[change + SETTLED :]]
    right.hist(settled, bins=bins, label=["before", "after"])
    for edge in (target * (1 - NEAR), target * (1 + NEAR)):
        right.axvline(edge, color="gray", linestyle=":", linewidth=1)
    right.axvline(target, color="black", linewidth=1)
    right.set(xlabel="global batch", ylabel="rounds", title=f"target {target:g}, dotted: ±{NEAR:.0%}")
    right.legend(fontsize="small")
    return figure
