"""Whether the simulator tells the truth: what it predicts of other clusters, against what they do.

A synchronous run of plain Horovod on four emulated ranks is recorded, as a user would record one. From its log alone
the simulator says how many samples a second *other* algorithms do at *other* speeds; then they really run, in the same
launch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from horovod_abs.bench import utilisation
from horovod_abs.bench.launch import Controller, run_ranks
from horovod_abs.observe.runlog import RunLog, read_run_log
from horovod_abs.plan.recorded import cluster_of
from horovod_abs.sim.simulate import ALGORITHMS, simulate

RANKS = "horovod_abs.bench.prediction_ranks"
PREDICTED = ("abs", "local")
"""Algorithms, of :data:`horovod_abs.sim.simulate.ALGORITHMS` and of ``utilisation_ranks.RUNS``."""
CLUSTERS: Mapping[str, tuple[float, ...]] = {
    "equal": (40.0, 40.0, 40.0, 40.0),
    "one slow": (30.0, 30.0, 30.0, 120.0),
    "all different": (80.0, 60.0, 30.0, 20.0),
}
"""None like the recorded one; in the last the ranks that were slow are quick."""
_VIRTUAL_SECONDS = 120.0


@dataclass(frozen=True)
class Setting:
    """What is predicted and measured.

    Args:
        recorded_ms: Emulated time of a micro-batch on each rank while the log is written, in milliseconds.
        clusters: The same of the clusters that are predicted, by name.
        parameters: About how many the model has.
        steps: Of the synchronous run.
        rounds: Of ABS-SGD in each measurement.
        repeats: Measurements of each cluster; the median counts.

    Raises:
        ValueError: a number is not positive, or clusters of another size.
    """

    recorded_ms: tuple[float, ...] = (20.0, 20.0, 40.0, 80.0)
    clusters: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(CLUSTERS))
    parameters: int = 1_000_000
    steps: int = 200
    rounds: int = 200
    repeats: int = 1

    def __post_init__(self) -> None:
        everything = [
            self.recorded_ms,
            *self.clusters.values(),
            (self.parameters, self.steps, self.rounds, self.repeats),
        ]
        if min(map(min, everything)) <= 0:
            raise ValueError(f"every time and number must be positive: {self}")
        if {len(of_one) for of_one in self.clusters.values()} != {len(self.recorded_ms)}:
            raise ValueError(f"every cluster must have {len(self.recorded_ms)} ranks, as the recorded one")

    def at(self, milliseconds: tuple[float, ...]) -> utilisation.Setting:
        """The same with ranks of these times, for the ranks of the utilisation benchmark."""
        return utilisation.Setting(
            milliseconds,
            self.parameters,
            repeats=self.repeats,
            rounds=self.rounds,
            synchronous_rounds=max(self.rounds // 10, 1),  # of local SGD, 8 micro-batches each
        )

    def recorded_of_steps(self) -> utilisation.Setting:
        """The synchronous run."""
        return replace(self.at(self.recorded_ms), synchronous_rounds=self.steps)

    def to_json(self) -> str:
        """As a command-line argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        clusters = {name: tuple(times) for name, times in values["clusters"].items()}
        return cls(**{**values, "recorded_ms": tuple(values["recorded_ms"]), "clusters": clusters})


def measure(setting: Setting, controller: Controller = "mpi") -> dict[str, Any]:
    """Record, predict, measure, and return the result as plain values.

    Raises:
        LaunchError: a rank has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(len(setting.recorded_ms), RANKS, [setting.to_json(), folder], controller=controller)
        measured = json.loads((Path(folder) / "measured.json").read_text())
        log = read_run_log(Path(folder) / "plain.jsonl")
    rows = [
        {
            "cluster": name,
            "algorithm": algorithm,
            "milliseconds": times,
            "predicted": predict(log, setting, times, algorithm),
            "measured": median(measured[name][algorithm]),
        }
        for name, times in setting.clusters.items()
        for algorithm in PREDICTED
    ]
    for row in rows:
        row["error"] = row["predicted"] / row["measured"] - 1
    return {"rows": rows, "recorded": log.samples_per_second, "controller": controller, "setting": asdict(setting)}


def predict(log: RunLog, setting: Setting, milliseconds: tuple[float, ...], algorithm: str) -> float:
    """Samples a second that an algorithm does on ranks of these times, by the log of a synchronous run alone."""
    recorded = cluster_of(log)
    ratios = [was / will_be for was, will_be in zip(setting.recorded_ms, milliseconds, strict=True)]
    ranks = tuple(replace(rank, speed=ratio) for rank, ratio in zip(recorded.ranks, ratios, strict=True))
    cluster = replace(recorded, ranks=ranks)
    return simulate(cluster, algorithm, megabytes=1.0, seconds=_VIRTUAL_SECONDS).samples_per_second


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`measure` for people."""
    table = Table(
        title=f"Samples a second, predicted from a synchronous run that did {result['recorded']:,.0f}",
        caption=f"4 emulated ranks, ms: of a micro-batch on each; {result['setting']['parameters']:,} parameters, "
        f"{result['controller']}",
    )
    for column in ("cluster", "ms", ""):
        table.add_column(column, no_wrap=True)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["cluster"],
            ", ".join(f"{ms:g}" for ms in row["milliseconds"]),
            ALGORITHMS[row["algorithm"]].title,
            f"{row['predicted']:,.0f}",
            f"{row['measured']:,.0f}",
            f"{row['error']:+.1%}",
        )
    return table
