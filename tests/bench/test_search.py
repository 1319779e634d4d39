from __future__ import annotations

from horovod_abs.bench.search import Point, Search

FREE = (None, None)


def distance(to: Point) -> object:
    return lambda point: sum(abs(a - b) for a, b in zip(point, to, strict=True))


def test_follows_an_optimum_over_the_edge_of_what_was_tried() -> None:
    search = Search((0, 0), (FREE, FREE), 14, distance((4, 0)))  # type: ignore[arg-type]
    assert search.ranking()[0] == (4, 0)
    assert len(search.scores) == 14


def test_is_settled_once_all_neighbours_of_the_best_were_tried() -> None:
    assert not Search((0, 0), (FREE, FREE), 2, distance((0, 0))).settled  # type: ignore[arg-type]
    assert Search((0, 0), (FREE, FREE), 5, distance((0, 0))).settled  # type: ignore[arg-type]


def test_keeps_within_its_bounds_and_ends_when_all_is_tried() -> None:
    search = Search((0, 1), ((0, 1), (0, 1)), 100, distance((9, 9)))  # type: ignore[arg-type]
    assert sorted(search.scores) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert search.settled
