"""The figure of recorded runs: batch by rank, utilisation, and what the programs told, all against training time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cycler import cycler
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from horovod_abs.core.ledger import Column, Floats
from horovod_abs.observe.plots import draw_accuracy
from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.summary import summarise

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that also those tell apart who do not see all of them (Okabe and Ito, "Color Universal Design", 2008)."""
_POINTS = 120
"""About as many steps as a line can show; where there are more rounds, several are drawn as one."""
_STRETCHES = 40
"""Stretches of time over which utilisation is taken: a round is too short, ranks end theirs at different times."""


def run_figure(logs: Sequence[RunLog], labels: Sequence[str] = ()) -> Figure:
    """Batch by rank of each run, and utilisation and all told values with the runs laid over one another.

    Args:
        logs: The runs.
        labels: Their names in legends; by default their files'.

    Raises:
        ValueError: there is no run.
        RunLogError: no round was merged in one of them.
    """
    if not logs:
        raise ValueError("there is no run to draw")
    for log in logs:
        log.refuse_empty()
    labels = labels or names_of([log.path for log in logs])
    told = told_values(logs)
    panels = len(logs) + 1 + len(told)
    columns = 2 if panels <= 4 else 3
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(5.6 * columns, 3.7 * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    top = 1.05 * max(float(np.max(batches_over_time(log)[1])) for log in logs)
    for each, log, label in zip(axes, logs, labels, strict=False):
        draw_batches_over_time(each, log, title="Batch by rank" if len(logs) == 1 else f"Batch by rank: {label}")
        each.set_ylim(0, top)
    draw_utilisation(axes[len(logs)], logs, labels)
    for each, name in zip(axes[len(logs) + 1 :], told, strict=True):
        draw_told(each, logs, labels, name)
    return figure


def names_of(paths: Sequence[Path]) -> list[str]:
    """The shortest names that tell files apart: their stems, or else as many folders as it takes."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.with_suffix("").parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def told_values(logs: Sequence[RunLog]) -> list[str]:
    """Names of the numbers that the programs told, accuracy first, then loss."""
    names = {
        name: None for log in logs for event in log.events for name, value in event.values.items() if _is_number(value)
    }
    order = {"accuracy": 0, "loss": 1}
    return sorted(names, key=lambda name: order.get(name, 2))


def result_of(log: RunLog, label: str) -> Result:
    """A recorded run as a result, with the accuracies that its program told."""
    history = log.history
    points = [
        Point(log.training_seconds(event.at), event.samples, float(event.values["accuracy"]))
        for event in log.events
        if _is_number(event.values.get("accuracy"))
    ]
    seconds = log.training_seconds(history[-1].merged_at)
    return Result(label, tuple(points), tuple(record.samples for record in history), summarise(history, seconds))


def batches_over_time(log: RunLog) -> tuple[Floats, Floats]:
    """Training time at the end of each stretch of rounds, and the mean samples of each rank in one of them.

    Returns:
        Times of shape ``(stretches,)``, samples of shape ``(stretches, ranks)``.
    """
    times, rows = _times_and_rows(log)
    starts = _stretches(len(times))
    counts = np.diff([*starts, len(times)])
    samples = np.add.reduceat(rows[:, :, Column.WEIGHT], starts) / counts[:, np.newaxis]
    return times[[*(starts[1:] - 1), len(times) - 1]], samples


def utilisation(log: RunLog) -> tuple[Floats, Floats]:
    """The share of equal stretches of training time in which each rank computed.

    A rank's computing in a round is taken to be spread evenly over the time between the merges before and after.

    Returns:
        Ends of the stretches, shape ``(stretches,)``; shares of shape ``(stretches, ranks)``, 0 to 1.
    """
    times, rows = _times_and_rows(log)
    done = np.cumsum(rows[:, :, Column.COMPUTE_SECONDS], axis=0)
    edges = np.linspace(0.0, times[-1], min(_STRETCHES, math.ceil(len(times) / 4)) + 1)
    at_edges = np.array([np.interp(edges, [0.0, *times], [0.0, *by_rank]) for by_rank in done.T])
    shares = np.diff(at_edges, axis=1).T / np.diff(edges)[:, np.newaxis] if times[-1] > 0 else at_edges.T[1:]
    return edges[1:], np.clip(shares, 0.0, 1.0)


def draw_batches_over_time(axes: Axes, log: RunLog, *, title: str = "Batch by rank") -> None:
    """Samples of each rank in a round against training time, one line a rank."""
    times, samples = batches_over_time(log)
    widths = _prepare(axes, samples.shape[1])
    for rank, line in enumerate(samples.T):
        axes.step(times, line, where="pre", linewidth=widths[rank], label=f"rank {rank}")
    _name(axes, title, "samples in a round" if len(times) == len(log.rounds) else "samples in a round (mean)")
    axes.set_ylim(bottom=0)


def draw_utilisation(axes: Axes, logs: Sequence[RunLog], labels: Sequence[str]) -> None:
    """Share of the time in which ranks computed: each rank of a single run, or the mean of the ranks of several."""
    if len(logs) == 1:
        times, shares = utilisation(logs[0])
        widths = _prepare(axes, shares.shape[1])
        for rank, line in enumerate(shares.T):
            axes.step([0.0, *times], [line[0], *line], where="pre", linewidth=widths[rank], label=f"rank {rank}")
    else:
        _prepare(axes, len(logs))
        for log, label in zip(logs, labels, strict=True):
            times, shares = utilisation(log)
            mean = shares.mean(axis=1)
            axes.step([0.0, *times], [mean[0], *mean], where="pre", label=label)
    _name(axes, "Utilisation" if len(logs) == 1 else "Utilisation, mean of the ranks", "share of time computing")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def draw_told(axes: Axes, logs: Sequence[RunLog], labels: Sequence[str], name: str) -> None:
    """A value that the programs told against training time, one line a run."""
    _prepare(axes, len(logs))
    if name == "accuracy":
        draw_accuracy(axes, [result_of(log, label) for log, label in zip(logs, labels, strict=True)])
        axes.set_xlim(left=0)
        return
    for log, label in zip(logs, labels, strict=True):
        points = [
            (log.training_seconds(event.at), float(event.values[name]))
            for event in log.events
            if _is_number(event.values.get(name))
        ]
        axes.plot([at for at, _ in points], [value for _, value in points], marker=".", label=label)
    _name(axes, f"{name[:1].upper()}{name[1:]} against time", name)


def _times_and_rows(log: RunLog) -> tuple[Floats, Floats]:
    times = np.array([log.training_seconds(line.merged_at) for line in log.rounds])
    return times, np.array([line.rows for line in log.rounds])


def _stretches(rounds: int) -> np.ndarray:
    """The first rounds of equal stretches."""
    return np.arange(0, rounds, math.ceil(rounds / _POINTS))


def _prepare(axes: Axes, lines: int) -> list[float]:
    """Colours for so many lines, and widths: where lines lie upon one another, those below are wider."""
    colours = PALETTE if lines <= len(PALETTE) else colormaps["viridis"](np.linspace(0, 0.95, lines))
    axes.set_prop_cycle(cycler(color=list(colours)))
    return [float(width) for width in np.linspace(1.0 + 0.6 * min(lines - 1, 5), 1.0, lines)]


def _name(axes: Axes, title: str, vertical: str) -> None:
    axes.set(xlabel="training time (s)", ylabel=vertical, title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    lines = len(axes.get_lines())
    axes.legend(ncols=min(4, math.ceil(lines / 4)), fontsize="small")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
