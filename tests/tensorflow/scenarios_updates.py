"""Averaging model updates, and what is to be compared with PyTorch: each returns what its run has done.

``test_across_frameworks`` computes the same rounds by the formulas of :mod:`horovod_abs.torch`, in one process.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

import horovod_abs.tensorflow as hvd
from tests.tensorflow.replay import Regression, Trial
from tests.tensorflow.scenario import Ranks, digest, flat, scenario, small_model, wrap


def momentum() -> Any:
    """SGD with momentum, which Keras and PyTorch compute alike: Keras rounds the momentum to float32."""
    return keras.optimizers.SGD(0.03, momentum=0.875)


def plain() -> Any:
    """SGD."""
    return keras.optimizers.SGD(0.03)


def record_of(trial: Trial, **rules: Any) -> dict[str, Any]:
    """What a run has done, on the first rank. Every rank must call it."""
    ranks, recorder = trial.ranks, trial.recorder
    ranks.assert_same(digest(trial.model), "parameters")
    everyone = ranks.gather((recorder.launches, recorder.sessions, recorder.micro_batches))
    launches, sessions, _ = everyone[0]
    assert all(other[:2] == (launches, sessions) for other in everyone), f"launches, sessions: {everyone}"
    assert launches > 5
    micro_batches: list[list[list[list[int]]]] = [[[] for _ in everyone] for _ in range(launches)]
    for rank, (_, _, done) in enumerate(everyone):
        for round, indices in done:
            micro_batches[round][rank].append(indices)
    if ranks.rank > 0:
        return {}
    return {
        "micro_batches": micro_batches,
        "sessions": sessions,
        "initial": [weight.tolist() for weight in recorder.initial_weights],
        "final": [weight.tolist() for weight in trial.model.get_weights()],
        "rules": rules,
    }


def train(ranks: Ranks, exchange: hvd.ModelUpdates, clock: Any = None, make: Any = momentum, **options: Any) -> Trial:
    """Two epochs of a run with model updates."""
    trial = Trial(ranks, make, options={"exchange": exchange, "clock": clock or hvd.SyncClock(), **options})
    for _ in range(2):
        trial.train(samples_per_epoch=150)
    assert len(trial.optimizer.history) == trial.recorder.launches
    return trial


@scenario(gloo=True)
def updates_by_each_clock(ranks: Ranks) -> list[dict[str, Any]]:
    """SGD with momentum under each clock."""
    clocks = (hvd.SyncClock(), hvd.CountClock(3), hvd.IntervalClock(0.01))
    return [record_of(train(ranks, hvd.ModelUpdates(), clock), max_staleness=16) for clock in clocks]


@scenario
def updates_of_equal_weight(ranks: Ranks) -> dict[str, Any]:
    """Workers weighted alike, gradients clipped, a small staleness."""
    trial = train(ranks, hvd.ModelUpdates(3, "workers"), clip_grad_norm=0.3)
    return record_of(trial, max_staleness=3, weighting="workers", clip_grad_norm=0.3)


@scenario
def updates_with_averaged_state(ranks: Ranks) -> dict[str, Any]:
    """The optimizer's momentum is averaged too."""
    trial = train(ranks, hvd.ModelUpdates(average_state=True), hvd.CountClock(3))
    return record_of(trial, average_state=True)


@scenario
def updates_with_an_outer_optimizer(ranks: Ranks) -> dict[str, Any]:
    """The mean update is the gradient of another optimizer."""
    outer = functools.partial(_built, rate=0.7)
    trial = train(ranks, hvd.ModelUpdates(outer=outer), hvd.CountClock(3))
    return record_of(trial, outer=0.7)


def _built(variables: list[Any], rate: float) -> Any:
    optimizer = keras.optimizers.SGD(rate, momentum=0.875, nesterov=True)
    optimizer.build(variables)
    return optimizer


@scenario
def updates_with_scaled_rates(ranks: Ranks) -> dict[str, Any]:
    """Learning rates scaled by the number of ranks, phased in over steps."""
    trial = train(ranks, hvd.ModelUpdates(), make=plain, lr_scaling="linear", warmup_steps=7)
    assert float(trial.optimizer.learning_rate) == 0.03
    return record_of(trial, lr_scaling="linear", warmup_steps=7)


@scenario
def gradients_as_pytorch(ranks: Ranks) -> list[dict[str, Any]]:
    """Gradients with delay 0 and 1 and both remedies."""
    records = []
    for rules in ({}, {"delay": 0}, {"staleness": "taylor", "taylor_lambda": 0.5}, {"staleness": "lookahead"}):
        options = {"exchange": hvd.Gradients(**rules), "clock": hvd.CountClock(2), "clip_grad_norm": 0.4}
        trial = Trial(ranks, momentum, options=options)
        trial.train(samples_per_epoch=400)
        records.append(record_of(trial, kind="Gradients", clip_grad_norm=0.4, **rules))
    return records


@scenario
def updates_that_are_not_finite(ranks: Ranks) -> None:
    """They weigh nothing, and the rank goes on from the central model."""
    task = Regression()
    task.y[3] = np.nan
    trial = Trial(ranks, momentum, task, options={"exchange": hvd.ModelUpdates(), "clock": hvd.CountClock(2)})
    batches = [np.array([3, 4])] + [np.array([5, 6 + ranks.rank])] * 20
    for indices in trial.optimizer.epoch(batches if ranks.rank == 0 else batches[1:], rounds=8):
        trial.step(indices)
    ranks.assert_same(digest(trial.model), "parameters")
    assert np.isfinite(flat(trial.model)).all()
    assert trial.optimizer.dropped_rounds[0] >= 1
    assert sum(trial.optimizer.dropped_rounds[1:]) == 0


@scenario
def updates_in_the_middle(ranks: Ranks) -> None:
    """Inside ``authoritative()`` the model is the central one, which is that of all ranks; then it is its own again."""
    trial = Trial(ranks, momentum, options={"exchange": hvd.ModelUpdates(), "clock": hvd.CountClock(2)})
    batches = [np.arange(4) + 7 * ranks.rank + k for k in range(9)]
    seen = []
    for number, indices in enumerate(trial.optimizer.epoch(batches, rounds=100)):
        trial.step(indices)
        if number == 6:
            own = flat(trial.model)
            with trial.optimizer.authoritative():
                seen.append((trial.optimizer.last_round.round, digest(trial.model)))
            assert np.array_equal(flat(trial.model), own)
            break
    merged = ranks.gather(seen[0] if seen else None)
    by_round = {}
    for each in merged:
        if each is not None:
            assert by_round.setdefault(each[0], each[1]) == each[1]
    ranks.assert_same(digest(trial.model), "parameters")


@scenario
def updates_are_refused(ranks: Ranks) -> None:
    """What does not go together with model updates."""
    with pytest.raises(ValueError, match=r"use_ema with ModelUpdates.*exchange=Gradients"):
        wrap(keras.optimizers.SGD(0.1, use_ema=True), exchange=hvd.ModelUpdates())
    with pytest.raises(ValueError, match=r"average_state=True with compression"):
        wrap(momentum(), exchange=hvd.ModelUpdates(average_state=True), compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match="warmup_steps="):
        wrap(momentum(), exchange=hvd.ModelUpdates(), warmup_samples=3)
    assert small_model().count_params() == 65
