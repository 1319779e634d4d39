"""What 1 to 4 hosts on a slow network do together, equal ones and a mixed lot, against what they could do alone.

The ranks are those of :mod:`horovod_abs.bench.utilisation`: emulated devices, here one on each host of this machine
(:mod:`horovod_abs.bench.hosts`), with a model whose exchange takes much longer than a micro-batch. Synchronous Horovod
is measured as it is and with its fp16 compression, both with the setting of Open MPI that ``bench network`` found best.
Local SGD averages the models after every eight micro-batches, and waits for that.

Only forward and backward passes are emulated. Adding up, exchanging and stepping really happen, for all hosts on the
processors and the memory of this one machine: hosts of their own would come nearer to the ideal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from horovod_abs.bench import utilisation
from horovod_abs.bench.hosts import Hosts
from horovod_abs.bench.launch import Controller
from horovod_abs.bench.network import bits_per_second

WAYS = {
    "ssgd": "synchronous Horovod",
    "ssgd-fp16": "the same with fp16",
    "local": "local SGD, 8 steps",
    "abs": "ABS-SGD",
    "updates": "ModelUpdates",
}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        hosts: Numbers of equal hosts.
        mixed: Speeds of a mixed cluster, by host; empty for none.
        micro_batch_ms: Emulated time of a micro-batch at speed 1, in milliseconds.
        parameters: About how many the model has.
        rate: Of each host's link, as ``tc`` takes it.
        rounds: Rounds of ABS-SGD and of ModelUpdates in a measurement, and half as many of the others.

    Raises:
        ValueError: a number is out of range.
    """

    hosts: tuple[int, ...] = (1, 2, 3, 4)
    mixed: tuple[float, ...] = (1.0, 1.0, 0.5, 0.25)
    micro_batch_ms: float = 100.0
    parameters: int = 11_000_000
    rate: str = "1gbit"
    rounds: int = 30

    def __post_init__(self) -> None:
        bits_per_second(self.rate)
        if not self.clusters or self.rounds < 2:
            raise ValueError(f"need hosts, and two rounds at least: {self}")
        for speeds in self.clusters:
            self.utilisation(speeds)

    @property
    def clusters(self) -> list[tuple[float, ...]]:
        """Speeds by host of all clusters."""
        return [*((1.0,) * count for count in self.hosts), *([self.mixed] if self.mixed else [])]

    def utilisation(self, speeds: Sequence[float]) -> utilisation.Setting:
        """What is measured of one cluster."""
        return utilisation.Setting(
            tuple(self.micro_batch_ms / speed for speed in speeds),
            self.parameters,
            repeats=1,
            rounds=self.rounds,
            synchronous_rounds=self.rounds // 2,
            warmup_rounds=3,
        )


def measure(setting: Setting, controller: Controller = "mpi") -> dict[str, Any]:
    """Measure one cluster after another, and return :func:`report`.

    Raises:
        HostsUnavailable: there is no root, or a program is missing.
        LaunchError: a rank has failed.
    """
    others = [name for name in WAYS if name not in ("ssgd", "abs")]
    results = []
    for speeds in setting.clusters:
        with Hosts(len(speeds), rate=setting.rate) as hosts:
            results.append(utilisation.measure(setting.utilisation(speeds), controller, hosts=hosts, others=others))
    return report(setting, controller, results)


def report(setting: Setting, controller: Controller, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result as plain values.

    Args:
        setting: What was measured.
        controller: Horovod's.
        results: Of each cluster, as :func:`horovod_abs.bench.utilisation.report` gives it.
    """
    clusters = [
        {"speeds": list(speeds), "ideal": result["ideal"], "ways": {name: result[name] for name in WAYS}}
        for speeds, result in zip(setting.clusters, results, strict=True)
    ]
    return {"clusters": clusters, "controller": controller, "setting": asdict(setting), "results": list(results)}


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`report` for people."""
    setting = result["setting"]
    table = Table(
        title=f"Scaling: micro-batches of {setting['micro_batch_ms']:g} ms, {setting['parameters']:,} parameters, "
        f"{setting['rate']}, {result['controller']}",
        caption="the ideal is what the hosts could do alone, added up",
    )
    table.add_column("speeds")
    table.add_column("")
    for column in ("samples/s", "of ideal", "idle", "batch"):
        table.add_column(column, justify="right")
    for cluster in result["clusters"]:
        for name, label in WAYS.items():
            way = cluster["ways"][name]
            table.add_row(
                ", ".join(f"{speed:g}" for speed in cluster["speeds"]) if name == "ssgd" else "",
                label,
                f"{way['samples_per_second']:,.0f}",
                f"{way['share_of_ideal']:.3f}",
                f"{way['idle_share']:.1%}",
                f"{way['mean_batch']:,.0f}",
            )
        table.add_section()
    return table
