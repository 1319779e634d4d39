"""How far each algorithm carries, in virtual time: 4 to 1,024 workers, from slow to quick networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from horovod_abs.bench.verdict import markdown_table
from horovod_abs.observe.progress import open_bar
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.simulate import ALGORITHMS, algorithm_named, simulate

PAYS = 0.5
"""An algorithm pays as long as it keeps the workers at this share of the ideal."""


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Args:
        cluster: Its ranks, in turn, are those of the larger ones.
        workers: Numbers of them.
        gbit: Gigabits a second of each link.
        algorithms: Names, in :data:`horovod_abs.sim.simulate.ALGORITHMS`.
        megabytes: Of the gradient, 10⁶ bytes.
        seconds: Virtual time of each.

    Raises:
        ValueError: an unknown algorithm, a number that is not positive, or a cluster whose links differ by rank.
    """

    cluster: ClusterModel
    workers: tuple[int, ...] = (4, 16, 64, 256, 1024)
    gbit: tuple[float, ...] = (1.0, 10.0, 100.0)
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    megabytes: float = 44.0
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.algorithms:
            algorithm_named(name)
        if not (self.workers and self.gbit and self.algorithms) or min(*self.workers, *self.gbit, self.seconds) <= 0:
            raise ValueError("there must be at least one number of workers, network and algorithm, and all positive")
        if not isinstance(self.cluster.network, Network):
            raise ValueError("a measured network has no bandwidth to change: describe the cluster in a TOML file")
        self.cluster.of_size(max(self.workers))

    def of(self, workers: int, gbit: float) -> ClusterModel:
        """The cluster of that size with that network."""
        assert isinstance(self.cluster.network, Network)
        return replace(self.cluster.of_size(workers), network=replace(self.cluster.network, mbit=gbit * 1000))


def measure(setting: Setting) -> dict[str, Any]:
    """Simulate all, and return the result as plain values."""
    cells = [
        (gbit, workers, name) for gbit in setting.gbit for workers in setting.workers for name in setting.algorithms
    ]
    found = []
    with open_bar(sum(workers for _, workers, _ in cells)) as bar:
        for gbit, workers, name in cells:
            bar.set_description_str(f"{name}, {workers} workers at {gbit:g} Gbit/s ", refresh=False)
            done = simulate(
                setting.of(workers, gbit), name, megabytes=setting.megabytes, seconds=setting.seconds, seed=0
            )
            found.append({**asdict(done), "gbit": gbit, "workers": workers, "share": done.share_of_ideal})
            bar.update(workers)
    return {
        "cluster": setting.cluster.name,
        "megabytes": setting.megabytes,
        "seconds": setting.seconds,
        "workers": list(setting.workers),
        "gbit": list(setting.gbit),
        "algorithms": list(setting.algorithms),
        "found": found,
    }


def pays_up_to(result: Mapping[str, Any], name: str, gbit: float) -> str:
    """The most workers up to which an algorithm never falls below :data:`PAYS` of the ideal."""
    most = 0
    for workers in result["workers"]:
        if _share(result, name, gbit, workers) < PAYS:
            break
        most = workers
    if most == 0:
        return "never"
    return "all" if most == result["workers"][-1] else f"{most:,}"


def rows(result: Mapping[str, Any], gbit: float, *, batches: bool = False) -> Iterator[list[str]]:
    """For each algorithm its title, the share of the ideal for each number of workers, and how far it pays.

    Args:
        result: Of :func:`measure`.
        gbit: Of the network.
        batches: Whether the samples of a global batch are added in brackets.
    """
    for name in result["algorithms"]:
        cells = []
        for workers in result["workers"]:
            batch = f" ({_found(result, name, gbit, workers)['batch']:,.0f})" if batches else ""
            cells.append(f"{_share(result, name, gbit, workers):.1%}{batch}")
        yield [ALGORITHMS[name].title, *cells, pays_up_to(result, name, gbit)]


def head(result: Mapping[str, Any]) -> list[str]:
    """Of the columns."""
    return ["", *(f"{workers:,}" for workers in result["workers"]), "pays up to"]


def to_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """For people, one for each network."""
    for gbit in result["gbit"]:
        table = Table(
            title=f"{result['cluster']}, {result['megabytes']:g} MB at {gbit:g} Gbit/s: share of the ideal by workers",
            caption=f"it pays up to the most workers at which it still does {PAYS:.0%} of the ideal",
        )
        for column in head(result):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for row in rows(result, gbit):
            table.add_row(*row)
        yield table


def to_markdown(result: Mapping[str, Any]) -> str:
    """The same for a file, with the global batches."""
    lines = [
        f"Cluster {result['cluster']}, {result['megabytes']:g} MB, {result['seconds']:g} virtual seconds of each. "
        "Share of the ideal by number of workers and, in brackets, samples in a global batch. An algorithm pays up to "
        f"the most workers at which it still does {PAYS:.0%} of the ideal.",
        "",
    ]
    for gbit in result["gbit"]:
        lines += [f"**{gbit:g} Gbit/s**", "", *markdown_table(head(result), rows(result, gbit, batches=True))]
    return "\n".join(lines)


def draw(result: Mapping[str, Any]) -> Figure:
    """Share of the ideal against the number of workers, one picture for each network."""
    figure = Figure(figsize=(3.6 * len(result["gbit"]) + 1.8, 3.8), layout="constrained")
    places: Sequence[Any] = figure.subplots(1, len(result["gbit"]), squeeze=False, sharey=True)[0]
    for axes, gbit in zip(places, result["gbit"], strict=True):
        for number, name in enumerate(result["algorithms"]):
            shares = [_share(result, name, gbit, workers) for workers in result["workers"]]
            ours = ALGORITHMS[name].ours
            style: dict[str, Any] = {"linewidth": 2.4} if ours else {"linewidth": 1.0}
            style["linestyle"] = "--" if number >= 10 else "-"  # ten colours
            axes.plot(result["workers"], shares, marker=".", label=ALGORITHMS[name].title, **style)
        axes.axhline(PAYS, color="gray", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(result["workers"], [f"{workers:,}" for workers in result["workers"]])
        axes.set(xlabel="workers", title=f"{gbit:g} Gbit/s", ylim=(0, 1.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.3)
    places[0].set_ylabel("share of the ideal")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def _found(result: Mapping[str, Any], name: str, gbit: float, workers: int) -> Mapping[str, Any]:
    return next(
        each
        for each in result["found"]
        if each["algorithm"] == name and each["gbit"] == gbit and each["workers"] == workers
    )


def _share(result: Mapping[str, Any], name: str, gbit: float, workers: int) -> float:
    return float(_found(result, name, gbit, workers)["share"])
