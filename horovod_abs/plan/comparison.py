"""Several algorithms on one cluster, side by side: run, table, plot, and which to take.

>>> from horovod_abs.plan.clusters import load
>>> comparison = compare(load("permanent"), ["synchronous", "abs"], megabytes=44.0, seconds=20.0, bar=False)
>>> comparison.recommendation.partition(":")[0]
'Take ABS-SGD'
>>> comparison.figure().savefig("comparison.png")
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from horovod_abs.observe.progress import open_bar
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.simulate import ALGORITHMS, Simulated, algorithm_named, simulate

WORTH_IT = 1.05
"""So much more of the samples another algorithm must do to be worth a change."""

_NAMED_RANKS = 4


@dataclass(frozen=True)
class Comparison:
    """What a cluster would do.

    Attributes:
        cluster: Its model.
        megabytes: Of the gradient, 10⁶ bytes; without meaning where the time of an exchange was measured.
        results: One for each algorithm.
    """

    cluster: ClusterModel
    megabytes: float
    results: tuple[Simulated, ...]

    @property
    def exchange(self) -> float:
        """Seconds of an exchange that nothing hides."""
        return self.cluster.network.allreduce_seconds(self.megabytes, self.cluster.size)

    @property
    def recommendation(self) -> str:
        """One line on which algorithm to take, and on what that rests."""
        theirs = [result for result in self.results if not ALGORITHMS[result.algorithm].ours]
        ours = [result for result in self.results if ALGORITHMS[result.algorithm].ours]
        plain = next((result for result in theirs if result.algorithm == "synchronous"), None)
        if plain is None or not ours:
            return "Simulate synchronous and at least one of abs, updates for a recommendation."
        best = max(ours, key=lambda result: result.samples_per_second)  # the first, among equals
        title, gain = ALGORITHMS[best.algorithm].title, best.samples_per_second / plain.samples_per_second
        if gain < WORTH_IT:
            return (
                f"Stay with synchronous Horovod: it does {plain.share_of_ideal:.0%} of the ideal, and {title} would do "
                f"{gain:.2f} times its samples."
            )
        return (
            f"Take {title}: {gain:.2f} times the samples of synchronous Horovod in the same time, "
            f"{best.share_of_ideal:.0%} of the ideal. How many samples an accuracy takes is not simulated."
        )

    def to_json(self) -> str:
        """All numbers."""
        described = {
            "cluster": self.cluster.name,
            "ranks": self.cluster.size,
            "megabytes": self.megabytes if isinstance(self.cluster.network, Network) else None,
            "exchange_seconds": self.exchange,
            "recommendation": self.recommendation,
            "results": [{**asdict(result), "share_of_ideal": result.share_of_ideal} for result in self.results],
        }
        return json.dumps(described, indent=1) + "\n"

    def table(self) -> Table:
        """The results for people."""
        by_rank = "least and most of a rank" if self.cluster.size > _NAMED_RANKS else "in % by rank"
        size = f"{self.megabytes:g} MB, " if isinstance(self.cluster.network, Network) else ""
        table = Table(
            title=f"{self.cluster.name}: {self.cluster.size} ranks, {size}an exchange takes {self.exchange:.3g} s",
            caption=f"of the ideal, {fmean(result.ideal for result in self.results):,.0f} samples/s; idle: {by_rank}; "
            "stale: micro-batches of a rank that its model misses",
        )
        for column in ("", "samples/s", "ideal", "idle", "batch", "stale"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for result in self.results:
            table.add_row(
                ALGORITHMS[result.algorithm].title,
                f"{result.samples_per_second:,.0f}",
                f"{result.share_of_ideal:.1%}",
                _idle(result.idle),
                f"{result.batch:,.0f} ± {result.batch_deviation:,.0f}",
                f"{result.staleness:.1f}",
            )
        return table

    def figure(self) -> Figure:
        """Share of the ideal by algorithm, beside how long each rank is idle."""
        figure = Figure(figsize=(10, 0.9 + 0.45 * len(self.results)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = [ALGORITHMS[result.algorithm].title for result in self.results]
        colours = ["#0072B2" if ALGORITHMS[result.algorithm].ours else "#999999" for result in self.results]
        bars = left.barh(names, [result.share_of_ideal for result in self.results], color=colours)
        left.bar_label(bars, [f"{result.samples_per_second:,.0f} samples/s" for result in self.results], padding=4)
        left.set(xlim=(0, 1.55), xlabel="share of the ideal")
        left.set_xticks([0, 0.25, 0.5, 0.75, 1])
        places = range(len(self.results))
        idle = [result.idle for result in self.results]
        right.boxplot(idle, orientation="horizontal", positions=places, whis=(0, 100), widths=0.5)
        right.set(xlim=(-0.03, 1.03), xlabel="idle time of the ranks: least, quartiles, most")
        right.set_yticks(places, names)
        left.invert_yaxis()
        for axes in (left, right):
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.grid(alpha=0.3, axis="x")
            axes.set_axisbelow(True)
        return figure


def compare(
    cluster: ClusterModel,
    algorithms: Iterable[str] = tuple(ALGORITHMS),
    *,
    megabytes: float = 44.0,
    seconds: float = 120.0,
    rounds: float = math.inf,
    seed: int = 0,
    bar: bool = True,
) -> Comparison:
    """Simulate several algorithms, with a progress bar.

    Args:
        cluster: Where.
        algorithms: Of :data:`horovod_abs.sim.simulate.ALGORITHMS`.
        megabytes: Of the gradient, 10⁶ bytes.
        seconds: Virtual time of each, at most.
        rounds: Exchanges of each, at most.
        seed: Of all that is random in the cluster.
        bar: Whether there is one.

    Raises:
        ValueError: as of :func:`horovod_abs.sim.simulate.simulate`.
    """
    results = []
    names = list(algorithms)
    for name in names:
        algorithm_named(name)
    with open_bar(100 * len(names), enabled=bar) as progress:
        for number, name in enumerate(names):
            progress.set_description_str(f"{name} ")

            def advance(share: float, begun: int = 100 * number) -> None:
                progress.update(begun + round(100 * share) - progress.n)

            results.append(
                simulate(
                    cluster, name, megabytes=megabytes, seconds=seconds, rounds=rounds, seed=seed, on_progress=advance
                )
            )
            advance(1.0)
    return Comparison(cluster, megabytes, tuple(results))


def _idle(by_rank: Sequence[float]) -> str:
    if len(by_rank) > _NAMED_RANKS:
        return f"{min(by_rank):.0%}–{max(by_rank):.0%}"
    return "/".join(f"{100 * idle:.0f}" for idle in by_rank)
