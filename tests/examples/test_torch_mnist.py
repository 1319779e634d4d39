from __future__ import annotations

from pathlib import Path

import pytest

from horovod_abs.bench.launch import run_ranks
from horovod_abs.observe.results import Result


def train(path: Path, *arguments: str, ranks: int = 4) -> tuple[Result, list[str]]:
    lines: list[str] = []
    command = [*arguments, "--json", str(path)]
    run_ranks(ranks, "horovod_abs.examples.torch_mnist", command, controller="mpi", show=lines.append)
    return Result.read(path), lines


@pytest.mark.ranks
def test_four_ranks_of_unequal_speed_learn_and_hardly_ever_wait(tmp_path: Path) -> None:
    speeds = ("--speeds", "1,1,0.5,0.25", "--base-ms", "10", "--micro-batch", "4")
    learning = ("--epochs", "3", "--lr", "0.05", "--momentum", "0.5", "--eval-every", "0.8", "--target-accuracy", "0.5")
    result, lines = train(tmp_path / "abs.json", *speeds, *learning)
    assert result.curve[0].accuracy < 0.6
    assert result.best_accuracy > 0.8
    assert result.curve[-1].samples >= 3 * 4000
    assert result.summary.share_of_ideal > 1.3 * 16 / 44  # equal batches reach 16/44 at best
    fast, also_fast, half, quarter = (rank.samples for rank in result.summary.ranks)
    assert fast > 1.5 * quarter  # four times as much on a quiet machine
    assert also_fast > 1.2 * half
    assert sum(map(sum, result.batches)) == result.summary.samples == result.curve[-1].samples
    output = "\n".join(lines)
    assert "epoch 3" in output
    assert "of ideal, idle" in output
    assert "idle share" in output
    assert "test accuracy" in output
    assert f"time to 50.0%: {result.seconds_to(0.5):.1f} s" in output


@pytest.mark.ranks
def test_plain_horovod_waits_for_the_slowest(tmp_path: Path) -> None:
    speeds = ("--speeds", "1,0.25", "--base-ms", "8", "--micro-batch", "16")
    result, _ = train(
        tmp_path / "plain.json", "--algorithm", "ssgd", *speeds, "--epochs", "9", "--max-seconds", "2", ranks=2
    )
    assert result.summary.samples == 4000  # the time is up in the first epoch, which is finished
    assert result.summary.share_of_ideal <= 2 / 5 + 0.02
    assert result.summary.ranks[0].idle_share > 0.5
    assert len(result.batches) == result.summary.rounds == 125
    assert result.batches[0] == (16.0, 16.0)
