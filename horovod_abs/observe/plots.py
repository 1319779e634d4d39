"""Figures of training runs, drawn without a display. Every function takes plain results and returns a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from horovod_abs.observe.results import Result

_LOWEST_SHOWN = 0.8
"""Accuracies below it pass in the first seconds."""


def draw_accuracy(axes: Axes, results: Sequence[Result], *, target: float | None = None) -> None:
    """Test accuracy against training time, one line a run: a running mean, over dots for the evaluations.

    Args:
        axes: Where to.
        results: The runs.
        target: An accuracy to mark, with the time at which each run reaches it.
    """
    for result in results:
        smooth = result.smooth
        (line,) = axes.plot(
            [point.seconds for point in smooth], [point.accuracy for point in smooth], label=result.label
        )
        axes.scatter(
            [point.seconds for point in result.curve],
            [point.accuracy for point in result.curve],
            s=6,
            alpha=0.4,
            color=line.get_color(),
        )
        reached = None if target is None else result.seconds_to(target)
        if reached is not None:
            axes.axvline(reached, color=line.get_color(), linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(target, color="gray", linestyle=":", linewidth=1)
    axes.set_ylim(bottom=_LOWEST_SHOWN, top=1.0)
    axes.yaxis.set_major_locator(MultipleLocator(0.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlabel="training time (s)", ylabel="test accuracy", title="Accuracy against time")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def draw_batches(axes: Axes, batches: Sequence[Sequence[float]], *, title: str = "Batch of each rank") -> None:
    """Samples of each rank in each round, one line a rank.

    Args:
        axes: Where to.
        batches: For each round the samples of each rank, shape ``(rounds, ranks)``.
        title: Above the axes.
    """
    for rank, samples in enumerate(np.asarray(batches).T):
        axes.step(range(len(samples)), samples, where="mid", linewidth=0.9, label=f"rank {rank}")
    axes.set(xlabel="round", ylabel="samples", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")


def comparison(
    results: Sequence[Result], *, target: float | None = None, batches_of: int = -1, rounds: int = 150
) -> Figure:
    """Accuracy against time of several runs, beside the batches of one of them.

    Args:
        results: The runs.
        target: As in :func:`draw_accuracy`.
        batches_of: Which run's batches to show.
        rounds: How many of its rounds, from the first.

    Raises:
        ValueError: there are no results.
    """
    if not results:
        raise ValueError("there is no run to draw")
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_accuracy(left, results, target=target)
    shown = results[batches_of]
    draw_batches(right, shown.batches[:rounds], title=f"Batch of each rank: {shown.label}")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the ending of ``path`` names, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
