from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from horovod_abs.bench import accuracy
from horovod_abs.bench.accuracy import Setting
from horovod_abs.bench.accuracy_ranks import padded
from horovod_abs.bench.cli import app
from horovod_abs.bench.hosts import unavailable
from horovod_abs.examples import mnist
from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.summary import summarise_totals


@pytest.mark.parametrize(
    ("values", "message"),
    [({"speeds": (1.0, 0.0)}, "positive"), ({"ways": ("sgd",)}, "one of ssgd"), ({"rate": "1gb"}, "not a rate")],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**values)


def test_report_says_when_targets_were_reached_and_that_one_was_not() -> None:
    curve = tuple(Point(float(second), 100.0 * second, 0.85 + 0.01 * second) for second in range(10))
    summary = summarise_totals([400.0, 500.0], [9.0, 9.0], 9.0, rounds=9, ideal=200.0)
    result = accuracy.report(Setting(), "mpi", {"updates": Result("model updates", curve, (), summary)})
    assert result["ways"]["updates"]["seconds_to"] == {"0.9": 6.0, "0.93": 9.0, "0.95": None}
    assert result["ways"]["updates"]["share_of_ideal"] == pytest.approx(0.5)
    assert json.loads(json.dumps(result))["setting"]["padding"] == 11_000_000
    assert accuracy.to_table(result).row_count == 1


def test_padding_is_exchanged_and_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = mnist.SmallCNN()
    model = padded(1000)
    assert sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters()) == 1000
    model.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model(images), plain(images))


@pytest.mark.hosts
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_model_updates_train_over_a_slow_network(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    path = tmp_path / "accuracy.json"
    small = ["--speeds", "1,0.5", "--micro-batch-ms", "20", "--padding", "1e6", "--rate", "100mbit"]
    outcome = CliRunner().invoke(app, ["accuracy", *small, "--ways", "updates", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    way = json.loads(path.read_text())["ways"]["updates"]
    assert way["best_accuracy"] > 0.9
    assert way["summary"]["rounds"] > 0
