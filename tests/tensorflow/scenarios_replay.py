"""``horovod-abs replay``: recorded runs of several ranks equal the formulas, in the first rank's process alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import horovod_abs.tensorflow.keras as hvd
from horovod_abs.cli import app
from horovod_abs.observe.recorder import initial_path, parameters_path
from horovod_abs.observe.schedule import ReplayError
from horovod_abs.tensorflow.replay import ReplayTask, replay
from tests.tensorflow.replay import Regression, adam, sgd
from tests.tensorflow.scenario import Ranks, digest, scenario, small_model, wrap
from tests.tensorflow.scenarios_recording import Training, folder_of

TASK = Regression(240)


def task(optimizer: Any = None, **changes: Any) -> ReplayTask:
    """The parameters to begin with are those that were saved, not these."""
    chosen = {"model": small_model(seed=9), "dataset": np.arange(240), "loss": TASK.loss, **changes}
    return ReplayTask(optimizer=optimizer or sgd(), **chosen)


def another_task() -> ReplayTask:
    """Of another run."""
    return task(keras.optimizers.SGD(0.03))


def not_a_task() -> int:
    """Nothing to replay."""
    return 3


def recorded(ranks: Ranks, path: Path, make: Any = sgd, hook: Any = None, **options: Any) -> None:
    """Two epochs; ``hook`` is told of each update."""
    run = Training(ranks, {**options, "record": path}, make=make)
    if hook is not None:
        run.optimizer.on_merge(functools.partial(hook, run.optimizer))
    for _ in range(2):
        run.epoch()
    ranks.assert_same(digest(run.model), "parameters")


def replayed(path: Path, optimizer: Any = None, **changes: Any) -> float:
    """The largest difference of the replay."""
    return replay(hvd.read_run_log(path), task(optimizer, **changes)).difference


@scenario
def replayed_alone(ranks: Ranks) -> dict[str, float]:
    """By the formulas, in one process: each exchange, changing rates, schedules, both loops of training."""
    variants: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
        "published": ({}, adam),
        "delay 0": ({"exchange": hvd.Gradients(delay=0)}, sgd),
        "taylor": ({"exchange": hvd.Gradients(staleness="taylor", taylor_lambda=5.0)}, sgd),
        "lookahead": ({"exchange": hvd.Gradients(staleness="lookahead"), "clip_grad_norm": 0.3}, adam),
        "updates": ({"exchange": hvd.ModelUpdates(4), "clip_grad_norm": 0.7}, adam),
        "state": ({"exchange": hvd.ModelUpdates(average_state=True)}, sgd),
        "scaled": ({"lr_scaling": "linear", "reference_batch_size": 10, "warmup_samples": 100}, _scheduled),
    }
    found = {}
    with folder_of(ranks) as folder:
        for name, (options, make) in variants.items():
            path = folder / f"{name}.jsonl"
            recorded(ranks, path, make, None if make is _scheduled else _slow_down, **options)
            if ranks.rank == 0:
                found[name] = replayed(path, make())
                assert found[name] <= 1e-10, found
                assert replayed(path, keras.optimizers.SGD(0.03)) > 1e-5, name
        path = folder / "fit.jsonl"
        model = small_model()
        model.compile(wrap(sgd(), record=path), "mse")
        data = hvd.adaptive_dataset(TASK.x, TASK.y, optimizer=model.optimizer, batch_size=7)
        model.fit(data, epochs=2, verbose=0, callbacks=hvd.callbacks.wrap([]))
        ranks.assert_same(digest(model), "parameters")
        if ranks.rank == 0:
            found["fit"] = replayed(path, dataset=(TASK.x, TASK.y), loss=lambda model, batch: _error(model, *batch))
            assert found["fit"] <= 1e-10, found
    return found


def _scheduled() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.03, 5, 0.8), momentum=0.9)


def _slow_down(optimizer: Any) -> None:
    optimizer.learning_rate = 0.97 * float(optimizer.learning_rate)


def _error(model: keras.Model, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x) - y) ** 2)


@scenario(gloo=True)
def replayed_by_the_command(ranks: Ranks) -> None:
    """It finds the framework in the log, and tells another task apart."""
    with folder_of(ranks) as folder:
        recorded(ranks, folder / "run.jsonl", exchange=hvd.Gradients(staleness="lookahead"))
        for name, status, message in (
            ("task", 0, "largest difference of the parameters"),
            ("another_task", 1, "more than the tolerance of 1e-10"),
            ("not_a_task", 1, "returned int, not a horovod_abs.tensorflow.replay.ReplayTask"),
        ):
            if ranks.rank == 0:
                given = ["replay", str(folder / "run.jsonl"), "--task", f"{__name__}:{name}", "--tolerance", "1e-10"]
                outcome = CliRunner().invoke(app, given)
                assert outcome.exit_code == status, outcome.output
                assert message in " ".join(outcome.output.split()), outcome.output


@scenario
def replayed_with_hooks_and_sums(ranks: Ranks) -> None:
    """What a program did at each merge is done again; losses may be sums."""
    with folder_of(ranks) as folder:
        for exchange in (hvd.Gradients(), hvd.ModelUpdates()):
            path = folder / f"{type(exchange).__name__}.jsonl"
            recorded(ranks, path, loss_reduction="sum", exchange=exchange)
            if ranks.rank == 0:
                assert replayed(path, loss=_sum) <= 1e-10
                assert replayed(path) > 1e-5
        recorded(ranks, folder / "hook.jsonl", adam, _forget)
        if ranks.rank == 0:
            assert replayed(folder / "hook.jsonl", adam(), on_merge=_forget) <= 1e-10
            assert replayed(folder / "hook.jsonl", adam()) > 1e-6
            with pytest.raises(ReplayError, match="on_merge= acts on each rank's own optimizer"):
                replayed(path, on_merge=_forget)


def _sum(model: keras.Model, indices: Any) -> Any:
    return TASK.loss(model, indices) * tf.cast(tf.size(indices), tf.float64)


def _forget(optimizer: Any) -> None:
    for variable in optimizer.variables:
        if variable.path.endswith("velocity"):
            variable.assign(0.5 * variable)


@scenario
def replayed_from_other_parameters(ranks: Ranks) -> None:
    """Parameters that are missing, or another model's, are told."""
    with folder_of(ranks) as folder:
        path = folder / "run.jsonl"
        recorded(ranks, path)
        if ranks.rank > 0:
            return
        other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="float64")])
        with pytest.raises(ReplayError, match=r"of shape \(6, 3\), \(3,\), the run's had \(6, 8\)"):
            replayed(path, model=other)
        initial_path(path).unlink()
        assert replayed(path) > 1e-3, "the task's own parameters are another beginning"
        assert replayed(path, model=small_model()) <= 1e-10
        parameters_path(path).unlink()
        with pytest.raises(ReplayError, match=r"run\.jsonl\.parameters\.pt.*are missing.*keep the files together"):
            replayed(path)
