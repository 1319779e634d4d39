"""Tuning with the same effort for everyone: so many trials on a grid without edges, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Point = tuple[int, ...]
Score = TypeVar("Score")


class Search(Generic[Score]):
    """Tries points of a grid of whole numbers, always next to the best that has an untried neighbour.

    An optimum at the edge of what was tried is therefore followed as far as the trials last.

    Args:
        start: The first point.
        bounds: The least and the greatest number on each axis; ``None`` for no bound.
        trials: So many points are tried.
        attempt: Returns the score of a point; less is better.

    Attributes:
        scores: Of each point that was tried.
    """

    def __init__(
        self,
        start: Point,
        bounds: tuple[tuple[int | None, int | None], ...],
        trials: int,
        attempt: Callable[[Point], Score],
    ) -> None:
        self.scores: dict[Point, Score] = {}
        self._bounds = bounds
        point: Point | None = start
        while point is not None and len(self.scores) < trials:
            self.scores[point] = attempt(point)
            point = next((new for old in self.ranking() for new in self._untried(old)), None)

    def ranking(self) -> list[Point]:
        """The points that were tried, the best first."""
        return sorted(self.scores, key=lambda point: self.scores[point])  # type: ignore[arg-type, return-value]

    @property
    def settled(self) -> bool:
        """Whether all neighbours of the best point were tried."""
        return not any(self._untried(self.ranking()[0]))

    def _untried(self, point: Point) -> Iterator[Point]:
        for axis, (least, most) in enumerate(self._bounds):
            for step in (1, -1):
                value = point[axis] + step
                new = (*point[:axis], value, *point[axis + 1 :])
                inside = (least is None or value >= least) and (most is None or value <= most)
                if inside and new not in self.scores:
                    yield new
