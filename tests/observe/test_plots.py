from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from horovod_abs.observe import plots
from horovod_abs.observe.results import Point
from tests.observe.test_results import RESULT

SLOWER = replace(
    RESULT,
    label="synchronous",
    curve=tuple(Point(2.0 * n, 0.0, accuracy) for n, accuracy in enumerate([0.5, 0.7, 0.9, 0.95, 0.96])),
)


def test_accuracy_has_a_line_for_each_run_and_marks_when_it_reaches_the_target() -> None:
    axes = Figure().subplots()
    plots.draw_accuracy(axes, [SLOWER, RESULT], target=0.92)
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    np.testing.assert_allclose(curves["synchronous"].get_xydata(), [(4.0, 0.7), (6.0, 0.85), (8.0, 0.93667)], atol=1e-4)
    np.testing.assert_allclose(curves["ABS-SGD"].get_xydata(), [(p.seconds, p.accuracy) for p in RESULT.smooth])
    dots = [collection.get_offsets() for collection in axes.collections]
    np.testing.assert_allclose(dots[0], [(point.seconds, point.accuracy) for point in SLOWER.curve])
    vertical = [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert [x[0] for x in vertical if x[0] == x[1]] == [8.0, 3.0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["synchronous", "ABS-SGD"]


def test_batches_have_a_line_for_each_rank() -> None:
    axes = Figure().subplots()
    plots.draw_batches(axes, RESULT.batches)
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == [[64.0, 80.0], [16.0, 16.0]]
    assert [line.get_label() for line in axes.get_lines()] == ["rank 0", "rank 1"]


def test_comparison_shows_the_batches_of_the_last_run_up_to_a_round() -> None:
    figure = plots.comparison([SLOWER, replace(RESULT, batches=((1.0, 2.0),) * 500)], rounds=40)
    left, right = figure.axes
    assert len(left.get_lines()) == 2
    assert [len(line.get_ydata()) for line in right.get_lines()] == [40, 40]
    assert "ABS-SGD" in right.get_title()


def test_comparison_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no run to draw"):
        plots.comparison([])


def test_saved_as_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "picture.png"
    plots.save(plots.comparison([RESULT]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
