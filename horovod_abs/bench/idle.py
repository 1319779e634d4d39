"""How much of its time each worker waits, against the staleness that it may reach, on a slow network.

The figure of [NoDelay]: with τ = 1 a worker waits for every exchange; from about τ = 8 on nobody waits. Each worker
runs the production engine, in virtual time (:mod:`horovod_abs.sim`), and nothing is computed. By default there are four
equal workers whose micro-batches take about 1 second, and exchanges of about 3: the paper's 27 MB of GoogLeNet over
1 Gbit/s take about as long as two or three of its micro-batches of 32.

References:
    [NoDelay] Talyansky et al., "Asynchronous SGD without gradient delay", ICLR 2019 submission.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from horovod_abs.core.clocks import SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry
from horovod_abs.observe.progress import open_bar
from horovod_abs.sim.cluster import Compute, Program, Synchronize, VirtualCluster


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        micro_batches: Mean seconds of a micro-batch, by worker.
        exchange: Seconds of an exchange, from the launch of the last worker on.
        jitter: Standard deviation of the logarithm of both.
        staleness: Values of τ.
        seconds: How long each run lasts, in virtual time.
        seed: Of the jitter.

    Raises:
        ValueError: a number is out of range.
    """

    micro_batches: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    exchange: float = 3.0
    jitter: float = 0.1
    staleness: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    seconds: float = 2000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.micro_batches or min(*self.micro_batches, self.exchange, self.seconds) <= 0 or self.jitter < 0:
            raise ValueError(f"every time must be positive: {self}")
        if not self.staleness or min(self.staleness) < 1:
            raise ValueError(f"every staleness must be at least 1, got {self.staleness}")


QUICK = Setting(seconds=300.0)


def shares(setting: Setting, staleness: int) -> list[float]:
    """The share of its time that each worker waits, with ``SyncClock``; closing is left out."""
    size = len(setting.micro_batches)
    engines = [Engine(size, SyncClock(), rank=rank, max_staleness=staleness) for rank in range(size)]

    def times(mean: float, *stream: int) -> Iterator[float]:
        random = np.random.default_rng((setting.seed, *stream))
        while True:
            yield mean * math.exp(setting.jitter * random.standard_normal() - setting.jitter**2 / 2)

    def program(rank: int) -> Program:
        for seconds in times(setting.micro_batches[rank], 0, rank):
            if cluster.now >= setting.seconds:
                break
            yield Compute(1, seconds)
        yield Synchronize()

    waited, computed = np.zeros(size), np.zeros(size)

    def on_merge(rank: int, entry: Entry) -> None:
        if rank == 0 and cluster.now < setting.seconds:
            waited[:] += entry.column(Column.WAIT_SECONDS)
            computed[:] += entry.column(Column.COMPUTE_SECONDS)

    exchanges = times(setting.exchange, 1)
    cluster = VirtualCluster(
        engines, [program(rank) for rank in range(size)], lambda exchange: next(exchanges), on_merge=on_merge
    )
    cluster.run()
    return [float(share) for share in waited / (waited + computed)]


def measure(setting: Setting) -> dict[str, Any]:
    """Measure all, and return the result as plain values."""
    idle = []
    with open_bar(len(setting.staleness)) as bar:
        for staleness in setting.staleness:
            idle.append({"staleness": staleness, "idle": shares(setting, staleness)})
            bar.update(1)
    return {"idle": idle, "setting": asdict(setting)}


def to_table(result: dict[str, Any]) -> Table:
    """:func:`measure` for people."""
    setting = result["setting"]
    table = Table(
        title="Share of time that workers wait",
        caption=f"exchange {setting['exchange']:g} s, micro-batches "
        f"{', '.join(f'{seconds:g}' for seconds in setting['micro_batches'])} s",
    )
    table.add_column("τ", justify="right")
    for worker in range(len(setting["micro_batches"])):
        table.add_column(f"worker {worker}", justify="right")
    for each in result["idle"]:
        table.add_row(str(each["staleness"]), *(f"{share:.1%}" for share in each["idle"]))
    return table


def draw(result: dict[str, Any]) -> Figure:
    """Idle share against τ, one line a worker."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    staleness = [each["staleness"] for each in result["idle"]]
    for worker, shares in enumerate(zip(*(each["idle"] for each in result["idle"]), strict=True)):
        axes.plot(staleness, shares, marker=".", label=f"worker {worker}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(staleness, [str(value) for value in staleness])
    axes.set(xlabel="staleness τ", ylabel="share of time waiting", title="Idle workers on a slow network")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
