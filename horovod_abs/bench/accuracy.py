"""How long hosts of unequal speed on a slow network really train to an accuracy, with an exchange as of a large model.

The MNIST example runs on hosts of this machine (:mod:`horovod_abs.bench.hosts`), one emulated device on each, with so
many idle parameters beside its own that an exchange takes longer than a micro-batch. Learning rates and momentum are
those that ``bench convergence`` found best for a similar network and exchange, in virtual time; none was tuned here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from horovod_abs.bench.hosts import Hosts
from horovod_abs.bench.launch import Controller, run_ranks
from horovod_abs.bench.network import bits_per_second
from horovod_abs.observe.results import Result

WAYS = {
    "ssgd": ("--algorithm", "ssgd", "--epochs", "6", "--lr", "0.04", "--momentum", "0.9"),
    "lookahead": ("--exchange", "lookahead", "--epochs", "10", "--lr", "0.08", "--momentum", "0.9"),
    "updates": ("--exchange", "updates:64", "--epochs", "10", "--lr", "0.04", "--momentum", "0.9"),
}
"""Options of the example. Plain Horovod needs a minute for an epoch, the others ten seconds."""
TARGETS = (0.90, 0.93, 0.95)


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        speeds: Of each host's device.
        micro_batch_ms: Emulated time of a micro-batch of 16 at speed 1, in milliseconds.
        padding: Idle parameters, of 4 bytes each.
        rate: Of each host's link, as ``tc`` takes it.
        ways: Names, in :data:`WAYS`.
        seed: Of model and data.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    speeds: tuple[float, ...] = (1.0, 1.0, 0.5, 0.25)
    micro_batch_ms: float = 100.0
    padding: int = 11_000_000
    rate: str = "1gbit"
    ways: tuple[str, ...] = tuple(WAYS)
    seed: int = 0

    def __post_init__(self) -> None:
        bits_per_second(self.rate)
        if not self.speeds or min(*self.speeds, self.micro_batch_ms, self.padding) <= 0:
            raise ValueError(f"every number must be positive: {self}")
        for way in self.ways:
            if way not in WAYS:
                raise ValueError(f"{way!r} is not a way of training: one of {', '.join(WAYS)}")


def measure(setting: Setting, controller: Controller = "mpi") -> dict[str, Any]:
    """Train in one way after the other, and return the results as plain values.

    Raises:
        HostsUnavailable: there is no root, or a program is missing.
        LaunchError: a rank has failed.
    """
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder, Hosts(len(setting.speeds), rate=setting.rate) as hosts:
        for way in setting.ways:
            path = Path(folder) / f"{way}.json"
            run_ranks(
                len(setting.speeds),
                "horovod_abs.bench.accuracy_ranks",
                [*_arguments(setting), *WAYS[way], "--json", str(path)],
                controller=controller,
                hosts=hosts,
            )
            results[way] = Result.read(path)
    return report(setting, controller, results)


def _arguments(setting: Setting) -> list[str]:
    options = {
        "speeds": ",".join(f"{speed:g}" for speed in setting.speeds),
        "base-ms": setting.micro_batch_ms,
        "target-accuracy": TARGETS[-1],
        "seed": setting.seed,
    }
    return [str(setting.padding), *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def report(setting: Setting, controller: Controller, results: Mapping[str, Result]) -> dict[str, Any]:
    """The results as plain values: with seconds to each of :data:`TARGETS`, ``None`` where it was not reached."""
    return {
        "ways": {
            way: {
                **asdict(result),
                "seconds_to": {f"{target:g}": result.seconds_to(target) for target in TARGETS},
                "best_accuracy": result.best_accuracy,
                "share_of_ideal": result.summary.share_of_ideal,
            }
            for way, result in results.items()
        },
        "controller": controller,
        "setting": asdict(setting),
    }


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`report` for people."""
    setting = result["setting"]
    table = Table(
        title=f"Seconds of training on hosts at {setting['rate']}, exchange of "
        f"{setting['padding'] * 4e-6:.0f} MB, {result['controller']}",
        caption=f"speeds {', '.join(f'{speed:g}' for speed in setting['speeds'])}, micro-batches of "
        f"{setting['micro_batch_ms']:g} ms at speed 1",
    )
    table.add_column("")
    for column in (*(f"to {target:.0%}" for target in TARGETS), "best", "of ideal"):
        table.add_column(column, justify="right")
    for way in result["ways"].values():
        times = ["not reached" if seconds is None else f"{seconds:.1f}" for seconds in way["seconds_to"].values()]
        table.add_row(way["label"], *times, f"{way['best_accuracy']:.1%}", f"{way['share_of_ideal']:.1%}")
    return table
