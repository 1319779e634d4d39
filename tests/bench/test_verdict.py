from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from horovod_abs.bench.verdict import (
    cell,
    draw,
    draw_curves,
    gains,
    mean_gain,
    to_markdown,
    to_tables,
    verdicts,
    write_report,
)

LIMIT = 60.0


def outcome(cluster: str, algorithm: str, short: float, long: float) -> dict[str, Any]:
    medians = {"short": short, "long": long}
    seconds = {name: [None if median >= LIMIT else median] for name, median in medians.items()}
    trial = [0.04, 0.9, 2]
    curves = {name: [(1.0, 100.0, 0.8), (2.0, 200.0, 0.9)] for name in medians}
    return {
        **{"curves": curves, "cluster": cluster, "algorithm": algorithm, "trial": trial, "settled": algorithm != "abs"},
        **{"medians": medians, "seconds": seconds, "limit": LIMIT},
    }


RESULT = {
    "task": {"name": "digits", "target": 0.95, "budget": 1000},
    "setting": {"trials": 2, "seeds": 1, "exchanges": ["short", "long"]},
    "clusters": {name: {"ideal_rate": 2200.0, "ideal_seconds": 5.0} for name in ("one", "two")},
    "ideal": {"trial": [0.1, 0.9, 4]},
    "outcomes": [
        outcome("one", "synchronous", 20.0, 30.0),
        outcome("one", "proportional", 12.0, 60.0),
        outcome("one", "abs", 10.0, 60.0),
        outcome("one", "updates", 6.0, 10.0),
        outcome("two", "synchronous", 60.0, 60.0),
        outcome("two", "proportional", 60.0, 60.0),
        outcome("two", "abs", 30.0, 20.0),
        outcome("two", "updates", 40.0, 60.0),
    ],
}


def test_the_best_of_ours_is_compared_with_the_best_baseline_at_each_place() -> None:
    found = gains(RESULT, ["abs", "updates"], ["synchronous", "proportional"])
    assert [(gain.ours, gain.baseline, gain.ratio, gain.bound) for gain in found] == [
        ("updates", "proportional", 2.0, ""),
        ("updates", "synchronous", 3.0, ""),
        ("abs", "proportional", 2.0, ">="),
        ("abs", "proportional", 3.0, ">="),
    ]
    assert mean_gain(found) == pytest.approx(2.5)


def test_the_papers_baselines_are_fewer_and_the_mean_is_over_clusters() -> None:
    by_title = {title: mean_gain(found) for title, found in verdicts(RESULT)}
    assert by_title["ABS-SGD as published, over the paper's baselines"] == pytest.approx(((2 + 0.5) / 2 + 2.5) / 2)
    assert by_title["ABS-SGD as published, over all baselines"] == pytest.approx(((1.2 + 0.5) / 2 + 2.5) / 2)


def test_without_baselines_or_ours_there_is_no_verdict() -> None:
    only = {**RESULT, "outcomes": [each for each in RESULT["outcomes"] if each["algorithm"] == "updates"]}  # type: ignore[index]
    assert verdicts(only) == []


def test_a_cell_says_the_multiple_of_the_ideal_or_that_the_target_was_missed() -> None:
    assert cell(RESULT["outcomes"][0], "short", 5.0) == "20.0 (4.00×)"  # type: ignore[index]
    assert cell(RESULT["outcomes"][1], "long", 5.0) == "> 60"  # type: ignore[index]


def test_tables_and_text_and_picture_show_every_algorithm() -> None:
    console = Console(width=160, record=True)
    for table in to_tables(RESULT):
        console.print(table)
    for text in (console.export_text(), to_markdown(RESULT)):
        assert all(title in text for title in ("synchronous SGD", "local SGD by speed", "ABS-SGD as published"))
        assert "0.04, 0.9 *" in text, "not settled"
    assert len(draw(RESULT).axes) == 4
    lines = draw_curves(RESULT, "one", "long").axes[0].lines
    assert [line.get_xydata().tolist() for line in lines[:4]] == [[[0, 0], [1, 0.8], [2, 0.9]]] * 4


def test_a_report_keeps_what_people_wrote_around_the_benchmarks_part(tmp_path: Path) -> None:
    report = tmp_path / "R.md"
    write_report(report, "a", "old")
    report.write_text(report.read_text() + "\nby hand\n")
    write_report(report, "b", "other")
    write_report(report, "a", "new")
    text = report.read_text()
    assert "old" not in text
    assert [text.count(word) for word in ("new", "by hand", "other")] == [1, 1, 1]
    assert text.index("new") < text.index("by hand") < text.index("other")
