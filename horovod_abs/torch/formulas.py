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
follow the formulas.

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164; Zheng et al., arXiv 1609.08326 (``"taylor"``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch, RecordedRound, ReplayError

Gradients = list[torch.Tensor | None]


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
    taken_at: list[torch.Tensor]


def compute(
    rounds: Sequence[RecordedRound],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[torch.nn.Module, MicroBatch], torch.Tensor],
    rules: Rules,
    *,
    after_merge: Callable[[], object] | None = None,
) -> None:
    """Train ``model`` by recorded rounds.

    Args:
        rounds: What was computed.
        model: The model with its first parameters.
        optimizer: A plain optimizer of it.
        loss: The loss of the samples with some indices.
        rules: How gradients become updates.
        after_merge: Called after each update.
    """
    _Replay(model, optimizer, loss, rules, after_merge).run(rounds)


class _Replay:
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, MicroBatch], torch.Tensor],
        rules: Rules,
        after_merge: Callable[[], object] | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
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
        sums = []
        for rank, micro_batches in enumerate(round.micro_batches):
            predicts = self.rules.staleness == "lookahead" and before is not None and before.round.samples(rank) > 0
            model = self._predicted(before, rank) if predicts and before is not None else self.model
            sums.append(self._sum_of_gradients(model, micro_batches))
        means = [_scaled(own, 1 / max(round.samples(rank), 1)) for rank, own in enumerate(sums)]
        mean = _scaled(_added(sums), 1 / max(round.batch, 1))
        return _Gradient(round, mean, means, [p.detach().clone() for p in parameters_of(self.optimizer)])

    def _sum_of_gradients(self, model: torch.nn.Module, micro_batches: Sequence[MicroBatch]) -> Gradients:
        total: Gradients = [None for _ in parameters_of(self.optimizer)]
        for indices in micro_batches:
            model.zero_grad()
            value = self.loss(model, indices)
            torch.autograd.backward(value * len(indices) if self.rules.loss_reduction == "mean" else value)
            total = _added([total, [p.grad for p in self._matching(model)]])
        model.zero_grad()
        return total

    def _matching(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters of ``model``, a copy or the model itself, in the optimizer's order."""
        if model is self.model:
            return parameters_of(self.optimizer)
        twins = {id(p): twin for p, twin in zip(self.model.parameters(), model.parameters(), strict=True)}
        return [twins[id(p)] for p in parameters_of(self.optimizer)]

    def _predicted(self, before: _Gradient, rank: int) -> torch.nn.Module:
        """A copy of the model after the step that rank's own gradient of the round before would cause."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        batch = self.last_batch or before.round.samples(rank)
        factor = self.rules.factor(batch, self.seen)
        self._step(optimizer, self._clipped(before.own[rank]), before.round, factor)
        return model

    def _apply_all_but(self, in_flight: int) -> None:
        while len(self.pending) > in_flight:
            gradient = self.pending.pop(0)
            batch, before = gradient.round.batch, self.seen
            self.seen += batch
            if batch == 0:
                continue
            self.last_batch = batch
            mean = self._clipped(gradient.mean)
            if not all(g is None or bool(torch.isfinite(g).all()) for g in mean):
                continue
            if self.rules.staleness == "taylor":
                mean = self._compensated(mean, gradient.taken_at)
            self._step(self.optimizer, mean, gradient.round, self.rules.factor(batch, before))
            if self.after_merge:
                self.after_merge()

    def _compensated(self, mean: Gradients, taken_at: list[torch.Tensor]) -> Gradients:
        return [
            None if g is None else g + self.rules.taylor_lambda * g * g * (p.detach() - then)
            for g, p, then in zip(mean, parameters_of(self.optimizer), taken_at, strict=True)
        ]

    def _clipped(self, gradients: Gradients) -> Gradients:
        """Shortened to ``clip_grad_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
        if self.rules.clip_grad_norm is None:
            return gradients
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients if g is not None))
        return _scaled(gradients, min(1.0, self.rules.clip_grad_norm / (norm + 1e-6)))

    def _step(
        self, optimizer: torch.optim.Optimizer, gradients: Gradients, round: RecordedRound, factor: float
    ) -> None:
        groups = optimizer.param_groups
        rates = round.learning_rates or [group["lr"] for group in groups]
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All its parameters, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return [None if g is None else g * factor for g in gradients]


def _added(parts: Sequence[Gradients]) -> Gradients:
    total: Gradients = [None for _ in parts[0]]
    for part in parts:
        for index, gradient in enumerate(part):
            if gradient is not None:
                so_far = total[index]
                total[index] = gradient.clone() if so_far is None else so_far + gradient
    return total
