"""How much of what the ranks could do alone the cluster does together: synchronous Horovod against ABS-SGD.

One launch measures both, several times in turn. Every rank emulates a device: a small real forward and backward pass,
whose gradient covers all parameters, stretched to the rank's micro-batch time by sleeping. ``step`` is not emulated: it
costs what it costs, on top. The ideal is the constant Σ 16/mᵢ over the ranks' micro-batch times mᵢ.

What is measured is a window of rounds in the middle of one endless epoch, from the merge of one round to the merge of a
later one on rank 0, so that neither the first rounds (:attr:`Setting.warmup_rounds`, for both algorithms alike) nor the
end of the run counts. As the emulated time is slept *after* the real backward pass, which has by then handed its
gradients to Horovod, synchronous Horovod overlaps all of its exchange with computing: the comparison flatters it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.table import Table

from horovod_abs import options
from horovod_abs.bench.hosts import Hosts
from horovod_abs.bench.launch import Controller, run_ranks
from horovod_abs.observe.summary import Summary

Framework = Literal["torch", "tensorflow"]

MICRO_BATCH = 16
"""Samples."""
RANKS: Mapping[Framework, str] = {
    "torch": "horovod_abs.bench.utilisation_ranks",
    "tensorflow": "horovod_abs.bench.utilisation_ranks_tensorflow",
}
"""What the ranks run."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        micro_batch_ms: Emulated time of a micro-batch, by rank, in milliseconds.
        parameters: About how many the model has.
        clock: As in :func:`horovod_abs.options.clock`.
        exchange: As in :func:`horovod_abs.options.exchange`.
        repeats: How often each algorithm is measured.
        rounds: Rounds of ABS-SGD in a measurement.
        synchronous_rounds: Rounds of synchronous Horovod in a measurement.
        warmup_rounds: Rounds before them.

    Raises:
        ValueError: a number is not positive, or an unknown clock or exchange.
    """

    micro_batch_ms: tuple[float, ...] = (20.0, 20.0, 40.0, 80.0)
    parameters: int = 1_000_000
    clock: str = "sync"
    exchange: str = "gradients"
    repeats: int = 3
    rounds: int = 300
    synchronous_rounds: int = 100
    warmup_rounds: int = 10

    def __post_init__(self) -> None:
        options.clock(self.clock)
        options.exchange(self.exchange)
        counts = (self.parameters, self.repeats, self.rounds, self.synchronous_rounds, self.warmup_rounds)
        if not self.micro_batch_ms or min(*self.micro_batch_ms, *counts) <= 0:
            raise ValueError(f"every time and number must be positive: {self}")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.micro_batch_ms)

    @property
    def ideal(self) -> float:
        """Samples per second of the ranks added up, if none ever did anything but compute."""
        return sum(1e3 * MICRO_BATCH / ms for ms in self.micro_batch_ms)

    @property
    def synchronous_bound(self) -> float:
        """Share of the ideal that equal batches cannot exceed: everybody is as fast as the slowest."""
        return 1e3 * MICRO_BATCH * self.ranks / max(self.micro_batch_ms) / self.ideal

    def to_json(self) -> str:
        """As a command-line argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "micro_batch_ms": tuple(values["micro_batch_ms"])})


def measure(
    setting: Setting,
    controller: Controller = "mpi",
    framework: Framework = "torch",
    *,
    hosts: Hosts | None = None,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """Launch the ranks, measure, and return :func:`report`.

    Args:
        setting: What is measured.
        controller: Horovod's.
        framework: What computes.
        hosts: Emulated hosts to run on, as many as ranks, in place of this machine.
        others: Names of further algorithms, see ``utilisation_ranks``; PyTorch only.

    Raises:
        LaunchError: a rank has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        arguments = [setting.to_json(), str(path), *others]
        run_ranks(setting.ranks, RANKS[framework], arguments, controller=controller, hosts=hosts)
        measured = json.loads(path.read_text())
    summaries = {name: [Summary.from_dict(each) for each in of_one] for name, of_one in measured["repeats"].items()}
    return report(setting, controller, summaries, measured["about"])


def report(
    setting: Setting, controller: Controller, repeats: Mapping[str, Sequence[Summary]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as plain values: medians over the repeats, and each repeat.

    Args:
        setting: What was measured.
        controller: Horovod's.
        repeats: For ``"ssgd"`` and ``"abs"`` one summary a repeat.
        about: What else the ranks tell.
    """
    result: dict[str, Any] = {name: _medians(summaries) for name, summaries in repeats.items()}
    result["ssgd"]["bound"] = setting.synchronous_bound
    return {
        **result,
        "speedup": result["abs"]["samples_per_second"] / result["ssgd"]["samples_per_second"],
        "ideal": setting.ideal,
        "controller": controller,
        "setting": asdict(setting),
        "about": dict(about),
        "repeats": {name: [summary.to_dict() for summary in of_one] for name, of_one in repeats.items()},
    }


def _medians(summaries: Sequence[Summary]) -> dict[str, float]:
    names = ("samples_per_second", "share_of_ideal", "idle_share", "mean_batch")
    return {name: median(getattr(summary, name) for summary in summaries) for name in names}


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`report` for people."""
    repeats = len(result["repeats"]["abs"])
    times = ", ".join(f"{ms:g}" for ms in result["setting"]["micro_batch_ms"])
    table = Table(
        title=f"Utilisation: micro-batches of {times} ms, {result['about']['parameters']:,} parameters, "
        f"{result['controller']}",
        caption=f"median of {repeats}; the ideal is {result['ideal']:,.0f} samples/s",
    )
    table.add_column("")
    for column in ("samples/s", "of ideal", "bound", "idle", "batch"):
        table.add_column(column, justify="right")
    for name, label, bound in (
        ("ssgd", "synchronous Horovod", f"{result['ssgd']['bound']:.3f}"),
        ("abs", "ABS-SGD", "1.000"),
    ):
        row = result[name]
        table.add_row(
            label,
            f"{row['samples_per_second']:,.0f}",
            f"{row['share_of_ideal']:.3f}",
            bound,
            f"{row['idle_share']:.1%}",
            f"{row['mean_batch']:,.0f}",
        )
    return table
