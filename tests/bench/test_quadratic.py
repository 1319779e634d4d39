"""The parabola: its limits as calculated are those of the production code."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from horovod_abs.bench.quadratic import WAYS, comes_to_rest, descend, draw_paths, largest_rate, limit, roots


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
def test_at_the_limit_the_largest_root_has_size_one(momentum: float, delay: int) -> None:
    at = limit(momentum, delay=delay)
    assert np.abs(roots(at, momentum, delay=delay)).max() == pytest.approx(1)
    assert (
        np.abs(roots(0.9 * at, momentum, delay=delay)).max() < 1 < np.abs(roots(1.1 * at, momentum, delay=delay)).max()
    )


@pytest.mark.parametrize(("name", "delay"), [("no delay", 0), ("as published", 1)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_limit_found_by_trying_is_the_calculated_one(name: str, delay: int, momentum: float) -> None:
    found = largest_rate(WAYS[name], momentum=momentum, halvings=7)
    assert found == pytest.approx(limit(momentum, delay=delay), abs=0.04)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_delayed_run_follows_the_recurrence(momentum: float) -> None:
    expected, rate = [1.0, 1.0], 0.3
    while len(expected) < 12:
        now, before = expected[-1], expected[-2]
        expected.append(now + momentum * (now - before) - rate * before)
    path = descend(WAYS["as published"], rate, momentum=momentum, steps=10)
    assert path == pytest.approx(expected[1 : 1 + len(path)])


def test_swings_that_stay_are_no_rest() -> None:
    assert not comes_to_rest([(-1.0) ** step for step in range(100)])
    assert comes_to_rest([0.9**step for step in range(100)])
    assert comes_to_rest([1.0, 0.1, *[0.0] * 98])
    assert not comes_to_rest([1.5**step for step in range(100)])


def test_lookahead_and_updates_bear_more_than_the_delayed_limit() -> None:
    for name in ("lookahead", "model updates"):
        assert comes_to_rest(descend(WAYS[name], 1.5, steps=60))
    assert not comes_to_rest(descend(WAYS["as published"], 1.5, steps=60))


def test_draws_a_line_for_each_way() -> None:
    axes = Figure().subplots()
    draw_paths(axes, {"a": [1.0, 0.5], "b": [1.0, 2.0]}, most=3.0)
    assert [line.get_label() for line in axes.lines[:2]] == ["a", "b"]
    assert axes.get_ylim() == (-3.0, 3.0)
