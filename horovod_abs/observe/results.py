"""The result of a training run as a file: accuracy against time, each rank's batches, and the summary."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from horovod_abs.observe.summary import Summary

SMOOTHED = 3
"""Evaluations in a running mean."""


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation.

    Attributes:
        seconds: Training time until then; evaluating is not counted.
        samples: Samples that all ranks had trained on.
        accuracy: On the test set, 0 to 1.
    """

    seconds: float
    samples: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """A training run.

    Attributes:
        label: Its name in tables and legends.
        curve: The evaluations, in order.
        batches: For each round the samples of each rank.
        summary: Of the whole run.
        options: What it was run with.
    """

    label: str
    curve: tuple[Point, ...]
    batches: tuple[tuple[float, ...], ...]
    summary: Summary
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def smooth(self) -> tuple[Point, ...]:
        """The curve with the mean of the last :data:`SMOOTHED` accuracies at each of its points but the first ones."""
        return tuple(
            replace(
                self.curve[last], accuracy=fmean(point.accuracy for point in self.curve[last + 1 - SMOOTHED : last + 1])
            )
            for last in range(SMOOTHED - 1, len(self.curve))
        )

    @property
    def best_accuracy(self) -> float:
        """The highest point of the smooth curve, 0 without one."""
        return max((point.accuracy for point in self.smooth), default=0.0)

    def seconds_to(self, accuracy: float) -> float | None:
        """Training time at which the smooth curve first reaches ``accuracy``; ``None`` if it does not.

        Smooth, because the first lucky evaluation of a run that swings widely would flatter it.
        """
        return next((point.seconds for point in self.smooth if point.accuracy >= accuracy), None)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read what :meth:`write` has written. Raises :class:`ValueError` if it is something else."""
        try:
            values = json.loads(path.read_text())
            return cls(
                label=values["label"],
                curve=tuple(Point(**point) for point in values["curve"]),
                batches=tuple(tuple(batch) for batch in values["batches"]),
                summary=Summary.from_dict(values["summary"]),
                options=values["options"],
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not the result of a training run: {error!r}") from error
