"""Simulated algorithms side by side: what is recommended, and how it is shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from horovod_abs.cli import app
from horovod_abs.plan.clusters import load
from horovod_abs.plan.comparison import Comparison, compare
from horovod_abs.sim.simulate import ALGORITHMS
from horovod_abs.sim.speeds import Noise


def quick(*algorithms: str, cluster: str = "permanent", workers: int = 4, megabytes: float = 44.0) -> Comparison:
    model = load(cluster).of_size(workers)
    return compare(model, algorithms or tuple(ALGORITHMS), megabytes=megabytes, seconds=20.0, bar=False)


def shown(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison.table())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_on_unequal_ranks_one_of_ours_is_recommended() -> None:
    comparison = quick()
    plain, best = comparison.results[0], comparison.results[-1]
    assert comparison.recommendation.startswith("Take ABS-SGD: ")
    assert f"{best.samples_per_second / plain.samples_per_second:.2f} times" in comparison.recommendation


def test_where_nothing_is_to_be_gained_synchronous_training_is_recommended() -> None:
    """Equal ranks, and an exchange that the backward pass hides."""
    model = load("permanent")
    equal = replace(model, ranks=(replace(model.ranks[0], speed=0.5, noise=Noise()),) * 4)
    comparison = compare(equal, ["synchronous", "abs"], megabytes=1.0, seconds=20.0, bar=False)
    assert comparison.recommendation.startswith("Stay with synchronous Horovod: it does 100% of the ideal")


def test_without_a_comparison_nothing_is_recommended() -> None:
    assert quick("abs").recommendation.startswith("Simulate synchronous and")
    assert quick("synchronous", "local").recommendation.startswith("Simulate synchronous and")


def test_the_table_fits_a_terminal_and_names_all() -> None:
    for workers in (4, 64):
        comparison = quick(workers=workers)
        text = shown(comparison)
        assert "…" not in text
        for result in comparison.results:
            assert ALGORITHMS[result.algorithm].title in text
            assert f"{result.samples_per_second:,.0f}" in text
            assert f"{result.share_of_ideal:.1%}" in text


def test_the_figure_shows_every_algorithm() -> None:
    comparison = quick("synchronous", "abs")
    left, _ = comparison.figure().axes
    assert [bar.get_width() for bar in left.patches] == [result.share_of_ideal for result in comparison.results]  # type: ignore[attr-defined]
    assert [label.get_text() for label in left.get_yticklabels()] == ["synchronous Horovod", "ABS-SGD"]


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "result.json", tmp_path / "result.png"
    options = ["--algorithms", "synchronous,abs", "--seconds", "20", "--json", str(json_file), "--plot", str(plot_file)]
    outcome = CliRunner().invoke(app, ["simulate", "permanent", *options])
    assert outcome.exit_code == 0, outcome.output
    assert "Take ABS-SGD" in outcome.output
    written = json.loads(json_file.read_text())
    expected = quick("synchronous", "abs")
    assert written["recommendation"] == expected.recommendation
    assert [each["share_of_ideal"] for each in written["results"]] == [one.share_of_ideal for one in expected.results]
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no cluster: pass one of permanent, transient, mixed"),
        (["mixed", "--algorithms", "abs,easgd"], "'easgd' is not an algorithm: one of synchronous"),
        (["mixed", "--seconds", "0"], "more than 0 megabytes, seconds"),
    ],
)
def test_what_cannot_be_simulated_is_told_without_a_traceback(arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(app, ["simulate", *arguments])
    assert outcome.exit_code == 1
    assert message in outcome.output
    assert "Traceback" not in outcome.output
