from __future__ import annotations

import pytest
from rich.console import Console

from horovod_abs.observe.summary import Summary, summarise, summarise_totals, to_table
from tests.observe.records import record

HISTORY = [record(0, (64, 16), (0.08, 0.08)), record(1, (80, 16), (0.10, 0.08))]


def test_sums_up_rounds() -> None:
    summary = summarise(HISTORY, 0.2, ideal=1000.0)
    assert summary.rounds == 2
    assert summary.samples == 176
    assert summary.mean_batch == 88
    assert summary.samples_per_second == pytest.approx(880)
    assert summary.share_of_ideal == pytest.approx(0.88)
    fast, slow = summary.ranks
    assert (fast.samples, slow.samples) == (144, 32)
    assert fast.share == pytest.approx(144 / 176)
    assert fast.compute_seconds == pytest.approx(0.18)
    assert slow.idle_seconds == pytest.approx(0.04)
    assert slow.idle_share == pytest.approx(0.2)
    assert summary.idle_share == pytest.approx((0.1 + 0.2) / 2)


def test_without_a_known_ideal_it_is_what_the_ranks_did_while_computing() -> None:
    summary = summarise(HISTORY, 0.2)
    assert summary.ideal == pytest.approx(144 / 0.18 + 32 / 0.16)
    assert summary.share_of_ideal == pytest.approx(880 / summary.ideal)


def test_a_rank_that_did_nothing_is_idle_and_adds_nothing_to_the_ideal() -> None:
    summary = summarise_totals([100, 0], [1.0, 0.0], 1.0, rounds=1)
    assert summary.ideal == pytest.approx(100)
    assert summary.ranks[1].idle_share == 1.0
    assert summary.ranks[1].share == 0.0


def test_round_trip() -> None:
    summary = summarise(HISTORY, 0.2)
    assert Summary.from_dict(summary.to_dict()) == summary


def test_table_tells_each_rank_and_the_cluster() -> None:
    console = Console(width=100, record=True, force_terminal=False)
    console.print(to_table(summarise(HISTORY, 0.2, ideal=1000.0), "a run"))
    text = console.export_text()
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert "a run" in text
    assert [cell.strip() for cell in rows[0].strip("│").split("│")] == ["0", "144", "81.8%", "0.2 s", "0.0 s", "10.0%"]
    assert [cell.strip() for cell in rows[2].strip("│").split("│")] == [
        "all",
        "176",
        "100.0%",
        "0.3 s",
        "0.1 s",
        "15.0%",
    ]
    assert "880 samples/s, 88.0% of the ideal" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: summarise([], 1.0), "no round was merged"),
        (lambda: summarise_totals([1.0], [1.0, 2.0], 1.0, rounds=1), "every rank"),
        (lambda: summarise_totals([1.0], [1.0], 0.0, rounds=1), "seconds must be positive"),
    ],
)
def test_bad_arguments_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
