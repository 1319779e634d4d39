"""Both of TensorFlow's examples, on two ranks of which one is four times as fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_abs.bench.launch import run_ranks
from horovod_abs.observe.results import Result
from horovod_abs.observe.runlog import read_run_log

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks, pytest.mark.timeout(300)]
SPEEDS = ("--speeds", "1,0.25", "--base-ms", "40", "--micro-batch", "16")


def train(example: str, path: Path, *arguments: str) -> tuple[Result, str]:
    lines: list[str] = []
    command = [*SPEEDS, *arguments, "--json", str(path)]
    run_ranks(2, f"horovod_abs.examples.{example}", command, controller="mpi", show=lines.append)
    return Result.read(path), "\n".join(lines)


@pytest.mark.parametrize("example", ["tf_mnist", "keras_mnist"])
def test_ranks_of_unequal_speed_learn_from_every_image_once_an_epoch(example: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    learning = ("--epochs", "2", "--lr", "0.05", "--momentum", "0.5", "--eval-every", "0.5", "--target-accuracy", "0.5")
    result, output = train(example, tmp_path / "abs.json", *learning, "--record", str(log))
    assert result.best_accuracy > 0.8
    assert result.curve[0].accuracy < result.best_accuracy
    assert result.curve[-1].samples == result.summary.samples == sum(map(sum, result.batches)) == 2 * 4000
    fast, slow = (rank.samples for rank in result.summary.ranks)
    assert fast > 1.2 * slow  # four times as much on a quiet machine
    assert "epoch 2" in output
    assert "test accuracy" in output
    assert f"time to 50.0%: {result.seconds_to(0.5):.1f} s" in output
    assert sum(entry.weight for entry in read_run_log(log).entries) == 2 * 4000


def test_plain_horovod_waits_for_the_slowest(tmp_path: Path) -> None:
    result, _ = train("tf_mnist", tmp_path / "plain.json", "--algorithm", "ssgd", "--epochs", "9", "--max-seconds", "2")
    assert result.summary.samples == 4000  # the time is up in the first epoch, which is finished
    assert result.summary.share_of_ideal <= 2 / 5 + 0.02
    assert result.summary.ranks[0].idle_share > 0.5
    assert len(result.batches) == result.summary.rounds == 125
    assert result.batches[0] == (16.0, 16.0)
    assert result.curve[-1].accuracy > 0.5
