"""The picture of who computed, waited and exchanged when."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from horovod_abs.observe.lanes import blocks_of, draw_lanes, lanes
from horovod_abs.sim.play import Block
from tests.observe.test_timeline import EXCHANGE, log_of

BLOCKS = [
    Block("compute", 0, 0, 0.0, 0.2),
    Block("wait", 1, 0, 0.1, 0.2),
    Block("exchange", None, 0, 0.2, 0.3),
    Block("compute", 1, 1, 0.3, 0.5),
]


def test_blocks_of_a_recorded_run(tmp_path: Path) -> None:
    blocks = blocks_of(log_of(tmp_path / "run.jsonl", rounds=4, ranks=3))
    exchanges = [block for block in blocks if block.what == "exchange"]
    assert [block.round for block in exchanges] == [0, 1, 2, 3]
    assert all(block.rank is None for block in exchanges)
    # the last of three ranks launches 20 ms after rank 0, whose exchange takes a quarter of a second
    assert [block.end - block.begin for block in exchanges] == pytest.approx([EXCHANGE - 0.02] * 4, abs=1e-3)
    computing = [block for block in blocks if block.what == "compute" and block.rank == 1]
    assert [block.end - block.begin for block in computing] == pytest.approx([0.8] * 4, abs=1e-3)


def test_a_lane_for_each_rank_and_one_for_the_network() -> None:
    axes = Figure().subplots()
    draw_lanes(axes, BLOCKS, begin=0.1, end=0.4, title="a run")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "network"]
    assert len(axes.collections) == len(BLOCKS)
    assert axes.get_xlim() == (0, pytest.approx(300))
    spans = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for c in axes.collections for path in c.get_paths()]
    assert spans[1] == pytest.approx((0, 100))


def test_what_lies_outside_is_not_drawn() -> None:
    axes = Figure().subplots()
    draw_lanes(axes, BLOCKS, begin=0.35, end=0.4)
    assert len(axes.collections) == 1


def test_several_runs_under_one_another() -> None:
    figure = lanes({"one": BLOCKS, "two": BLOCKS}, seconds=0.5)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one", "two"]


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing happened between 7 and 8 s"):
        draw_lanes(Figure().subplots(), BLOCKS, begin=7, end=8)
    with pytest.raises(ValueError, match="nothing to draw"):
        lanes({}, seconds=1)
