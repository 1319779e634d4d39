from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from horovod_abs.cli import app
from horovod_abs.core.ledger import Entry
from horovod_abs.driver import RoundRecord
from horovod_abs.observe import runplots
from horovod_abs.observe.runlog import RunLog, RunLogError, read_run_log
from tests.observe.recorded import Cluster, recorded, spread_out


def steady(path: Path, rounds: int, ranks: int = 3) -> RunLog:
    """Rounds of a second each, in which rank i computes 0.9 − 0.1·i seconds."""
    cluster = Cluster(path, ranks)
    for number, rows in enumerate(spread_out(rounds, ranks)):
        entry = Entry(number, rows)
        cluster.recorder.round(entry, RoundRecord.of(entry, 0.1, number + 1.0))
    return read_run_log(path)


def test_utilisation_is_the_share_of_time_computing(tmp_path: Path) -> None:
    times, shares = runplots.utilisation(steady(tmp_path / "run.jsonl", 200))
    np.testing.assert_allclose(shares, np.tile([0.9, 0.8, 0.7], (len(times), 1)), atol=1e-9)
    np.testing.assert_allclose(np.diff(times), np.full(len(times) - 1, 200 / len(times)))
    assert times[-1] == 200


def test_batches_of_many_rounds_are_means(tmp_path: Path) -> None:
    log = steady(tmp_path / "run.jsonl", 1000)
    times, samples = runplots.batches_over_time(log)
    assert len(times) <= 125
    assert times[-1] == 1000
    np.testing.assert_allclose(samples, np.tile([48, 32, 16], (len(times), 1)))


def test_pauses_are_no_training_time(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl", epochs=(8, 8))
    times, shares = runplots.utilisation(log)
    assert times[-1] == 16.0
    assert shares[:-1].min() > 0.4
    result = runplots.result_of(log, "a run")
    assert [(point.seconds, point.accuracy) for point in result.curve] == [(8.0, 0.5), (16.0, 0.6)]
    assert result.summary.seconds == 16.0


def test_one_run_shows_its_ranks(tmp_path: Path) -> None:
    figure = runplots.run_figure([recorded(tmp_path / "run.jsonl", epochs=(9, 9))])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Batch by rank", "Utilisation", "Accuracy against time", "Loss against time"]
    for axes in figure.axes[:2]:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1"]


def test_several_runs_lie_over_one_another(tmp_path: Path) -> None:
    logs = [recorded(tmp_path / name, epochs=(9, 9)) for name in ("fast.jsonl", "slow.jsonl")]
    figure = runplots.run_figure(logs)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["Batch by rank: fast", "Batch by rank: slow", "Utilisation, mean of the ranks"]
    for axes in figure.axes[2:]:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fast", "slow"]
    np.testing.assert_allclose(figure.axes[4].get_lines()[0].get_xydata(), [(9.0, 2.0), (18.0, 1.0)])


def test_every_axis_is_named_and_colours_differ(tmp_path: Path) -> None:
    for ranks in (2, 16):
        figure = runplots.run_figure([recorded(tmp_path / f"{ranks}.jsonl", epochs=(9,), ranks=ranks)])
        for axes in figure.axes:
            assert "(s)" in axes.get_xlabel()
            assert axes.get_ylabel()
        assert len({str(line.get_color()) for line in figure.axes[0].get_lines()}) == ranks


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/run.jsonl"], ["run"]),
        (["a/x.jsonl", "b/y.jsonl"], ["x", "y"]),
        (["a/run.jsonl", "b/run.jsonl"], ["a/run", "b/run"]),
        (["run.jsonl", "run.jsonl"], ["run.jsonl (1)", "run.jsonl (2)"]),
    ],
)
def test_names_are_as_short_as_can_be(paths: list[str], names: list[str]) -> None:
    assert runplots.names_of([Path(path) for path in paths]) == names


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run to draw"):
        runplots.run_figure([])
    Cluster(tmp_path / "run.jsonl").recorder.event({"loss": 1.0})
    with pytest.raises(RunLogError, match="no round was merged yet"):
        runplots.run_figure([read_run_log(tmp_path / "run.jsonl")])


def test_a_value_that_only_some_runs_told(tmp_path: Path) -> None:
    first = recorded(tmp_path / "told.jsonl")
    second = steady(tmp_path / "silent.jsonl", 9)
    axes = Figure().subplots()
    runplots.draw_told(axes, [first, second], ["told", "silent"], "loss")
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [2, 0]


def test_the_commands(tmp_path: Path) -> None:
    recorded(tmp_path / "run.jsonl")
    log, picture, trace = (str(tmp_path / name) for name in ("run.jsonl", "new/run.png", "new/trace.json"))
    result = CliRunner().invoke(app, ["plot", log, log, "-o", picture])
    assert result.exit_code == 0, result.output
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["timeline", log, "-o", trace])
    assert result.exit_code == 0, result.output
    assert "traceEvents" in Path(trace).read_text()
    result = CliRunner().invoke(app, ["tensorboard", log, "-o", str(tmp_path / "board")])
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "board").iterdir())
    for command in ("plot", "timeline"):
        result = CliRunner().invoke(app, [command, trace, "-o", picture])
        assert result.exit_code == 1
        assert "trace.json, line 1: has kind None" in result.output.replace("\n", "")
