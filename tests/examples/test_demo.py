from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from horovod_abs.bench.launch import LaunchError
from horovod_abs.examples import demo
from horovod_abs.examples.arguments import parse
from horovod_abs.exchanges import Gradients, ModelUpdates
from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.summary import summarise_totals


def result(label: str, curve: list[tuple[float, float]], samples: float) -> Result:
    summary = summarise_totals([samples / 2, samples / 2], [8.0, 4.0], 10.0, rounds=100, ideal=100.0)
    return Result(label, tuple(Point(seconds, 0.0, accuracy) for seconds, accuracy in curve), ((8.0, 8.0),), summary)


PLAIN = result("plain", [(4.0, 0.85), (5.0, 0.92), (6.0, 0.93), (9.0, 0.97), (10.0, 0.98)], samples=400.0)
ADAPTIVE = result("abs", [(1.0, 0.88), (2.0, 0.92), (3.0, 0.93), (6.0, 0.94), (8.0, 0.98)], samples=900.0)


def table_rows(*results: Result) -> dict[str, list[str]]:
    console = Console(width=120, record=True, force_terminal=False)
    console.print(demo.compare(results))
    lines = [line.strip("│").split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_compares_side_by_side() -> None:
    rows = table_rows(PLAIN, ADAPTIVE, PLAIN)
    assert rows["time to 90%"] == ["6.0 s", "3.0 s (50% less)", "6.0 s"]
    assert rows["time to 95%"] == ["10.0 s", "8.0 s (20% less)", "10.0 s"]
    assert rows["time to 96%"] == ["10.0 s", "not reached", "10.0 s"]
    assert rows["best accuracy"] == ["96.0%", "95.0%", "96.0%"]
    assert rows["samples per second"] == ["40 (1.00×)", "90 (2.25×)", "40 (1.00×)"]
    assert rows["share of the ideal"] == ["40.0%", "90.0%", "40.0%"]
    assert rows["idle time"] == ["40.0%", "40.0%", "40.0%"]


def test_says_so_where_there_is_no_gain() -> None:
    assert table_rows(ADAPTIVE, PLAIN)["time to 90%"] == ["3.0 s", "6.0 s (100% more)"]
    assert table_rows(ADAPTIVE, PLAIN)["time to 96%"] == ["not reached", "10.0 s"]


def test_marks_the_highest_target_that_both_reach() -> None:
    assert demo.shown_target([PLAIN, ADAPTIVE]) == 0.95
    assert demo.shown_target([PLAIN, replace(ADAPTIVE, curve=())]) is None


@pytest.mark.parametrize(("framework", "example"), [("torch", "torch_mnist"), ("tensorflow", "tf_mnist")])
def test_runs_all_algorithms_on_the_same_cluster_and_draws(
    framework: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run_ranks(ranks: int, module: str, arguments: list[str], controller: str | None) -> None:
        args = parse(None, arguments)
        started.append((ranks, module, args, controller))
        (PLAIN if args.algorithm == "ssgd" else ADAPTIVE).write(args.json)

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    monkeypatch.setattr(
        "sys.argv", ["demo", "--output", str(tmp_path), "--controller", "gloo", "--framework", framework]
    )
    assert demo.main() == 0
    (ranks, module, plain, controller), (_, _, adaptive, _), (_, _, updates, _) = started
    assert (ranks, module, controller) == (4, f"horovod_abs.examples.{example}", "gloo")
    assert (plain.algorithm, adaptive.algorithm, updates.algorithm) == ("ssgd", "abs", "abs")
    assert (adaptive.exchange, updates.exchange) == (Gradients(staleness="lookahead"), ModelUpdates())
    assert plain.speeds == (1.0, 1.0, 0.5, 0.25)
    for same in ("speeds", "base_ms", "micro_batch", "seed"):
        assert getattr(plain, same) == getattr(adaptive, same) == getattr(updates, same)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(*args: object, **keywords: object) -> None:
        raise LaunchError("rank 2 is gone")

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    monkeypatch.setattr("sys.argv", ["demo", "--output", str(tmp_path)])
    assert demo.main() == 1
    assert "rank 2 is gone" in capsys.readouterr().err
