"""The formulas of [ABS-SGD] and of remedies for its delay, in one process: what a run of many ranks must equal.

What was computed by many ranks, at their own speeds, with exchanges under way, is here one loop over rounds. With
x_k the parameters after all merges that round k has seen, and g_i^k the sum of the gradients of rank i's samples::

    ḡ^k     = (Σ_i g_i^k) / N^k                    the mean gradient of all samples of round k
    x_{k+1} = x_k − step(ḡ^{k−1})                  delay 1; with delay 0: x_k − step(ḡ^k)

    staleness None:         g_i^k is taken at x_k
    staleness "taylor":     ḡ + λ ḡ⊙ḡ⊙(x − x') in the place of ḡ, taken at x' and applied to x
    staleness "lookahead":  g_i^k is taken at x_k − step(g_i^{k−1} / n_i^{k−1}), rank i's own prediction

Where all ranks had closed, nothing was pending: there all rounds before are applied. Empty rounds change nothing.

Nothing of the exchange is used (no payload, driver, or engine), so that a run and its replay can only agree if both
follow the formulas. A framework's model and optimizer are behind a :class:`Learner`.

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164; Zheng et al., arXiv 1609.08326 (``"taylor"``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch, RecordedRound, ReplayError

Arrays = list[NDArray[np.float64]]
Gradients = list[NDArray[np.float64] | None]
Moments = Mapping[Hashable, NDArray[np.float64]]


class Learner(Protocol):
    """A model, a plain optimizer of it, and a loss. Arrays are in the optimizer's order of parameters."""

    def parameters(self) -> Arrays:
        """Copies of the parameters."""

    def set_parameters(self, values: Arrays) -> None:
        """Take these parameters."""

    def gradients(self, indices: MicroBatch) -> Gradients:
        """Of the loss of the samples with these indices, at the parameters."""

    def step(self, gradients: Gradients, factor: float, rates: Sequence[float] | None) -> None:
        """Let the optimizer step, with its learning rates, or these, times ``factor``."""

    def state(self) -> Any:
        """A copy of all that the optimizer keeps."""

    def set_state(self, state: Any) -> None:
        """Take what :meth:`state` gave, once."""

    def moments(self) -> Moments:
        """Copies of what the optimizer keeps for each parameter."""

    def set_moments(self, moments: Moments) -> None:
        """Take these, as far as the optimizer keeps them already."""

    def forget(self) -> None:
        """Let the optimizer begin anew."""

    def outer(self, make: Any) -> Callable[[Arrays], Arrays]:
        """An outer optimizer of a copy of the parameters: takes gradients, and returns its parameters after a step."""


@dataclass(frozen=True)
class Rules:
    """How gradients become updates; the names are those of ``DistributedOptimizer`` and ``Gradients``."""

    delay: int = 1
    staleness: str | None = None
    taylor_lambda: float = 0.04
    clip_grad_norm: float | None = None
    loss_reduction: str = "mean"
    factor: Callable[[float, float], float] = Scaling().factor
    """By what learning rates are multiplied, from the round's samples and those merged before."""

    @classmethod
    def of(cls, log: RunLog) -> Rules:
        """Those of a recorded run. Raises :class:`ReplayError` if it exchanged something else than gradients."""
        exchange, options = log.run.exchange, log.run.options
        if exchange.get("name") != "Gradients":
            raise ReplayError(f"{log.path}: a run with {exchange.get('name')} is not one with Gradients")
        return cls(
            delay=exchange["delay"],
            staleness=exchange["staleness"],
            taylor_lambda=exchange["taylor_lambda"],
            clip_grad_norm=options["clip_grad_norm"],
            loss_reduction=options["loss_reduction"],
            factor=Scaling(**options["scaling"]).factor,
        )


@dataclass
class _Gradient:
    """The gradient of one round, until it is applied.

    Attributes:
        mean: Over all samples.
        own: For each rank the mean over its own samples.
        taken_at: The shared parameters when it was computed.
    """

    round: RecordedRound
    mean: Gradients
    own: list[Gradients]
    taken_at: Arrays


def compute(
    rounds: Sequence[RecordedRound],
    learner: Learner,
    rules: Rules,
    *,
    after_merge: Callable[[], object] | None = None,
) -> None:
    """Train by recorded rounds.

    Args:
        rounds: What was computed.
        learner: The model with its first parameters.
        rules: How gradients become updates.
        after_merge: Called after each update.
    """
    _Replay(learner, rules, after_merge or (lambda: None)).run(rounds)


class _Replay:
    def __init__(self, learner: Learner, rules: Rules, after_merge: Callable[[], object]) -> None:
        self.learner = learner
        self.rules = rules
        self.after_merge = after_merge
        self.pending: list[_Gradient] = []
        self.seen = 0
        self.last_batch = 0

    def run(self, rounds: Sequence[RecordedRound]) -> None:
        for round in rounds:
            in_flight = 0 if self.rules.delay == 0 or round.drained else 1
            self._apply_all_but(in_flight)
            self.pending.append(self._gradient(round, self.pending[-1] if self.pending else None))
        self._apply_all_but(0)

    def _gradient(self, round: RecordedRound, before: _Gradient | None) -> _Gradient:
        here = self.learner.parameters()
        sums = []
        for rank, micro_batches in enumerate(round.micro_batches):
            if self.rules.staleness == "lookahead" and before is not None and before.round.samples(rank) > 0:
                self._predict(before, rank)
            sums.append(self._sum_of_gradients(micro_batches))
            self.learner.set_parameters(here)
        means = [_scaled(own, 1 / max(round.samples(rank), 1)) for rank, own in enumerate(sums)]
        return _Gradient(round, _scaled(_added(sums), 1 / max(round.batch, 1)), means, here)

    def _sum_of_gradients(self, micro_batches: Sequence[MicroBatch]) -> Gradients:
        parts = [
            _scaled(self.learner.gradients(indices), len(indices) if self.rules.loss_reduction == "mean" else 1)
            for indices in micro_batches
        ]
        return _added([[None for _ in self.learner.parameters()], *parts])

    def _predict(self, before: _Gradient, rank: int) -> None:
        """Take the step that rank's own gradient of the round before would cause; the optimizer keeps nothing of it."""
        state = self.learner.state()
        batch = self.last_batch or before.round.samples(rank)
        mean = clipped(before.own[rank], self.rules.clip_grad_norm)
        self.learner.step(mean, self.rules.factor(batch, self.seen), before.round.learning_rates)
        self.learner.set_state(state)

    def _apply_all_but(self, in_flight: int) -> None:
        while len(self.pending) > in_flight:
            gradient = self.pending.pop(0)
            batch, before = gradient.round.batch, self.seen
            self.seen += batch
            if batch == 0:
                continue
            self.last_batch = batch
            mean = clipped(gradient.mean, self.rules.clip_grad_norm)
            if not all(g is None or bool(np.isfinite(g).all()) for g in mean):
                continue
            if self.rules.staleness == "taylor":
                mean = self._compensated(mean, gradient.taken_at)
            self.learner.step(mean, self.rules.factor(batch, before), gradient.round.learning_rates)
            self.after_merge()

    def _compensated(self, mean: Gradients, taken_at: Arrays) -> Gradients:
        return [
            None if g is None else g + self.rules.taylor_lambda * g * g * (x - then)
            for g, x, then in zip(mean, self.learner.parameters(), taken_at, strict=True)
        ]


def clipped(gradients: Gradients, longest: float | None) -> Gradients:
    """Shortened to ``clip_grad_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if longest is None:
        return gradients
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients if g is not None))
    return _scaled(gradients, min(1.0, longest / (norm + 1e-6)))


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return [None if g is None else g * factor for g in gradients]


def _added(parts: Sequence[Gradients]) -> Gradients:
    total = list(parts[0])
    for part in parts[1:]:
        for index, gradient in enumerate(part):
            if gradient is not None:
                so_far = total[index]
                total[index] = gradient if so_far is None else so_far + gradient
    return total
