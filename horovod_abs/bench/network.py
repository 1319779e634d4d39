"""How long an exchange takes over a slow network, against what the network allows, and what it costs meanwhile.

Hosts of this machine (:mod:`horovod_abs.bench.hosts`), one rank on each, sum a model's gradient as ABS-SGD does. A ring
of N ranks sends each byte 2 (N − 1) / N times through every link, and no way of summing sends fewer: that is the limit.
What a plain TCP socket around the same ring takes, without adding anything up, is measured beside it.

The hosts share this machine's processors: where there are more hosts than processors, everything that takes processor
time costs more here than on hosts of their own.

References:
    Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from horovod_abs import mpi
from horovod_abs.bench.hosts import Hosts
from horovod_abs.bench.launch import Controller, run_ranks

RANKS = "horovod_abs.bench.network_ranks"
"""What the ranks run."""

_DEFAULT = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "0"}
"""Keeps this package from choosing."""


@dataclass(frozen=True)
class Way:
    """One way to exchange.

    Attributes:
        label: For people.
        controller: Horovod's.
        variables: Of the ranks' environment.
    """

    label: str
    controller: Controller
    variables: Mapping[str, str]


WAYS = {
    "mpi-default": Way("Open MPI's default", "mpi", _DEFAULT),
    "mpi-ring": Way("Open MPI, ring", "mpi", {}),
    "mpi-segments": Way(
        "Open MPI, ring in segments of 1 MB",
        "mpi",
        {
            **mpi.RING,
            "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
            "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": str(2**20),
        },
    ),
    "mpi-unfused": Way("Open MPI, ring, nothing fused", "mpi", {"HOROVOD_FUSION_THRESHOLD": "0"}),
    "gloo": Way("Gloo", "gloo", {}),
}
"""The ring is what this package sets where Open MPI runs over several hosts, see :func:`horovod_abs.mpi.prepare`."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        hosts: How many.
        rate: Of each host's link, as ``tc`` takes it: ``"1gbit"``, ``"100mbit"``.
        parameters: Numbers in the gradient.
        repeats: Exchanges of each kind; the median counts.
        ways: Names from :data:`WAYS`.

    Raises:
        ValueError: a number is out of range, or an unknown way.
    """

    hosts: int = 4
    rate: str = "1gbit"
    parameters: int = 11_000_000
    repeats: int = 5
    ways: tuple[str, ...] = tuple(WAYS)

    def __post_init__(self) -> None:
        bits_per_second(self.rate)
        if self.hosts < 2 or self.parameters < 4 or self.repeats < 1:
            raise ValueError(f"need two hosts, four parameters and one repeat at least: {self}")
        if not self.ways or not set(self.ways) <= set(WAYS):
            raise ValueError(f"ways must be among {', '.join(WAYS)}, got {', '.join(self.ways) or 'none'}")

    def limit(self, bytes_each: int) -> float:
        """Seconds that no exchange of so many bytes a number can go below."""
        ring = 2 * (self.hosts - 1) / self.hosts
        return ring * 8 * bytes_each * self.parameters / bits_per_second(self.rate)


def bits_per_second(rate: str) -> float:
    """A rate as ``tc`` takes it.

    Raises:
        ValueError: it is not a number with ``kbit``, ``mbit`` or ``gbit``.
    """
    match = re.fullmatch(r"([0-9.]+)([kmg])bit", rate)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ValueError(f"{rate!r} is not a rate such as 1gbit or 100mbit")
    return number * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


QUICK = Setting(parameters=2_000_000, repeats=3, ways=("mpi-ring", "gloo"))


def measure(setting: Setting) -> dict[str, Any]:
    """Make the hosts, exchange in each way, and return :func:`report`.

    Raises:
        HostsUnavailable: there is no root, or a program is missing.
        LaunchError: a rank has failed.
    """
    measured: dict[str, dict[str, Any]] = {}
    with Hosts(setting.hosts, rate=setting.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        for name in setting.ways:
            way = WAYS[name]
            arguments = [str(setting.parameters), str(setting.repeats), way.label, str(path)]
            run_ranks(setting.hosts, RANKS, arguments, controller=way.controller, hosts=hosts, variables=way.variables)
            measured[name] = json.loads(path.read_text())
    return report(setting, measured)


def report(setting: Setting, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result as plain values.

    Args:
        setting: What was measured.
        measured: By way, what ``network_ranks`` has written: seconds of each exchange, among others.
    """
    limits = {"float32": setting.limit(4), "float16": setting.limit(2)}
    ways = {}
    for name, each in measured.items():
        seconds = {kind: median(values) for kind, values in each["seconds"].items()}
        ways[name] = {
            "label": WAYS[name].label,
            "seconds": seconds,
            "of_limit": {kind: seconds[kind] / limit for kind, limit in limits.items()},
            "processor_seconds": each["processor_seconds"],
            "exchange_beside": each["exchange_beside"],
            "micro_batch_factor": each["micro_batch_beside"] / each["micro_batch_alone"],
        }
    return {
        "limits": limits,
        "sockets": median(each["sockets"] for each in measured.values()),
        "ways": ways,
        "setting": asdict(setting),
        "measured": dict(measured),
    }


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`report` for people."""
    setting, limits = result["setting"], result["limits"]
    table = Table(
        title=f"Exchange of {setting['parameters']:,} numbers among {setting['hosts']} hosts at {setting['rate']}",
        caption=f"median of {setting['repeats']}; the limit is {limits['float32']:.3f} s for float32 and "
        f"{limits['float16']:.3f} s for float16; plain sockets take {result['sockets']:.3f} s for float32. "
        "The last two: an exchange while all ranks compute, and how much longer a micro-batch takes beside it",
    )
    table.add_column("")
    exchanges = ("float32", "of limit", "in 4 tensors", "float16", "of limit", "processor")
    for column in (*exchanges, "computing", "micro-batch"):
        table.add_column(column, justify="right")
    for way in result["ways"].values():
        seconds, of_limit = way["seconds"], way["of_limit"]
        table.add_row(
            way["label"],
            f"{seconds['float32']:.3f} s",
            f"{of_limit['float32']:.2f}",
            f"{seconds['parts']:.3f} s",
            f"{seconds['float16']:.3f} s",
            f"{of_limit['float16']:.2f}",
            f"{way['processor_seconds']:.2f} s",
            f"{way['exchange_beside']:.2f} s",
            f"×{way['micro_batch_factor']:.2f}",
        )
    return table
