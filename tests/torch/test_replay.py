"""``horovod-abs replay`` on runs of one rank. Runs of several: ``scenarios_recording``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import horovod_abs.torch as hvd
from horovod_abs.cli import app
from horovod_abs.observe.recorder import initial_path, parameters_path
from horovod_abs.observe.schedule import ReplayError, recorded_rounds
from horovod_abs.replays import load_task
from horovod_abs.torch.replay import ReplayTask, replay
from tests.torch.replay import Regression, adam, sgd
from tests.torch.scenario import small_model, wrap

pytestmark = pytest.mark.usefixtures("single_rank")

DATA = Regression(120)
TASK = ReplayTask(small_model(seed=8), sgd, DATA, DATA.loss)
EXCHANGES: dict[str, dict[str, Any]] = {
    "published": {"exchange": hvd.Gradients()},
    "delay 0": {"exchange": hvd.Gradients(delay=0)},
    "taylor": {"exchange": hvd.Gradients(staleness="taylor", taylor_lambda=5.0)},
    "lookahead": {"exchange": hvd.Gradients(staleness="lookahead")},
    "clipped": {"clip_grad_norm": 0.05},
    "lookahead, clipped, scaled": {
        "exchange": hvd.Gradients(staleness="lookahead"),
        "clip_grad_norm": 0.3,
        "lr_scaling": "linear",
        "reference_batch_size": 10,
        "warmup_samples": 100,
    },
    "sum": {"loss_reduction": "sum"},
}


def task() -> ReplayTask:
    """For the command line."""
    return replace(TASK, model=small_model(seed=8))


def another_task() -> ReplayTask:
    return replace(task(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.03))


def not_a_task() -> int:
    return 3


def record(path: Path, epochs: int = 2, *, make: Any = sgd, skip: int | None = None, **options: Any) -> torch.nn.Module:
    """A run with an adaptive sampler."""
    model = small_model()
    optimizer = wrap(model, make(model), record=path, **{"clock": hvd.CountClock(2), **options})
    loader = DataLoader(DATA, 7, sampler=hvd.AdaptiveSampler(DATA, optimizer))  # type: ignore[arg-type]
    total = options.get("loss_reduction") == "sum"
    for _ in range(epochs):
        for number, indices in enumerate(optimizer.epoch(loader)):
            if number == skip:
                continue
            loss = DATA.loss(model, indices)
            (loss * len(indices) if total else loss).backward()
            optimizer.step(samples=len(indices))
    return model


def replayed(path: Path, **changes: Any) -> float:
    loss = DATA.loss
    if hvd.read_run_log(path).run.options["loss_reduction"] == "sum":
        changes = {"loss": lambda model, indices: loss(model, indices) * len(indices), **changes}
    return replay(hvd.read_run_log(path), replace(TASK, model=small_model(seed=8), **changes)).difference


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_run_is_repeated_by_the_formulas(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, **EXCHANGES[name])
    assert replayed(path) <= 1e-10
    assert replayed(path, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.03)) > 1e-5


@pytest.mark.parametrize(
    ("name", "section", "key", "value"),
    [
        ("published", "exchange", "delay", 0),
        ("taylor", "exchange", "taylor_lambda", 4.9),
        ("taylor", "exchange", "staleness", None),
        ("lookahead", "exchange", "staleness", None),
        ("clipped", "options", "clip_grad_norm", 0.06),
        ("lookahead, clipped, scaled", "options", "scaling", {"rule": "none"}),
    ],
)
def test_any_other_rule_is_told_apart(name: str, section: str, key: str, value: object, tmp_path: Path) -> None:
    """Else the comparison would prove nothing."""
    path = tmp_path / "run.jsonl"
    record(path, **EXCHANGES[name])
    first, *rest = path.read_text().splitlines()
    run = json.loads(first)
    run[section][key] = value
    path.write_text("\n".join([json.dumps(run), *rest]) + "\n")
    assert replayed(path) > 1e-7


def test_all_samples_of_each_epoch_are_in_the_rounds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, epochs=3)
    rounds = recorded_rounds(hvd.read_run_log(path))
    indices = [index for each in rounds for batches in each.micro_batches for batch in batches for index in batch]
    for epoch in range(3):
        assert sorted(indices[120 * epoch : 120 * (epoch + 1)]) == list(range(120))
    assert indices[:120] != indices[120:240]
    assert sum(each.drained for each in rounds) == 3


def test_hooks_and_precision(tmp_path: Path) -> None:
    """Other hyper-parameters than learning rates are changed again; a replay in float32 rounds otherwise."""
    path = tmp_path / "run.jsonl"
    model = small_model()
    optimizer = wrap(model, adam(model), record=path)

    def decay(of: Any) -> None:
        of.param_groups[0]["betas"] = (0.9 * of.param_groups[0]["betas"][0], 0.999)

    optimizer.on_merge(lambda: decay(optimizer))
    loader = DataLoader(DATA, 7, sampler=hvd.AdaptiveSampler(DATA, optimizer))  # type: ignore[arg-type]
    for indices in optimizer.epoch(loader):
        DATA.loss(model, indices).backward()
        optimizer.step(samples=len(indices))
    assert replayed(path, optimizer=adam, on_merge=decay) <= 1e-10
    assert replayed(path, optimizer=adam) > 1e-6
    single = Regression(120, torch.float32)
    rounded = replayed(path, optimizer=adam, on_merge=decay, loss=single.loss, dtype=torch.float32)
    assert 1e-10 < rounded < 1e-3


# -- what cannot be repeated -----------------------------------------------------------------------------------------


def test_without_an_adaptive_sampler_it_is_not_known_who_had_what(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = small_model()
    optimizer = wrap(model, sgd(model), record=path)
    for indices in optimizer.epoch(DataLoader(DATA, 7)):  # type: ignore[arg-type]
        DATA.loss(model, indices).backward()
        optimizer.step(samples=len(indices))
    with pytest.raises(ReplayError, match=r"has no AdaptiveSampler.*Record a run whose loader has one"):
        replayed(path)


def test_samples_outside_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = small_model()
    optimizer = wrap(model, sgd(model), record=path)
    DATA.loss(model, torch.arange(4)).backward()
    optimizer.step(samples=4)
    optimizer.synchronize()
    with pytest.raises(ReplayError, match=r"round 0 has samples outside any epoch.*optimizer\.epoch\(loader\)"):
        replayed(path)


def test_a_batch_that_was_skipped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, skip=4)
    with pytest.raises(ReplayError, match=r"cannot be told: a batch was .*skipped"):
        replayed(path)


def test_model_updates(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, exchange=hvd.ModelUpdates(), clock=hvd.SyncClock())
    assert replayed(path) <= 1e-10
    with pytest.raises(ReplayError, match="on_merge= acts on each rank's own optimizer"):
        replay(hvd.read_run_log(path), replace(TASK, on_merge=lambda optimizer: None))


def test_parameters_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    with pytest.raises(ReplayError, match=r"of shape \(3, 6\), \(3,\), the run's had \(8, 6\)"):
        replay(hvd.read_run_log(path), replace(TASK, model=torch.nn.Linear(6, 3).double()))
    initial_path(path).unlink()
    assert replayed(path) > 1e-3, "the task's own parameters are another beginning"
    assert replay(hvd.read_run_log(path), replace(TASK, model=small_model())).difference <= 1e-10
    parameters_path(path).unlink()
    with pytest.raises(ReplayError, match=r"run\.jsonl\.parameters\.pt.*are missing.*keep the files together"):
        replayed(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.torch.test_replay", "write package.module:function"),
        ("tests.torch.nothing:task", "cannot be found: No module named"),
        ("tests.torch.test_replay:nothing", "cannot be found: module .* has no attribute 'nothing'"),
        ("tests.torch.test_replay:not_a_task", "returned int, not a horovod_abs.torch.replay.ReplayTask"),
    ],
)
def test_a_task_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        load_task(name, ReplayTask)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)

    def run(name: str) -> tuple[int, str]:
        arguments = ["replay", str(path), "--task", f"{__name__}:{name}", "--tolerance", "1e-10"]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.output

    status, output = run("task")
    assert status == 0, output
    assert "largest difference of the parameters" in output
    status, output = run("another_task")
    assert status == 1
    assert "more than the tolerance of 1e-10" in output
    parameters_path(path).unlink()
    status, output = run("task")
    assert status == 1
    assert "are missing" in output
