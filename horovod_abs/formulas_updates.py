"""The formulas of [NoDelay] in one process: what a run of many ranks with ``ModelUpdates`` must equal.

With c^k the central model that exchanges 0 to k−1 have gone into, and u_i^k what rank i's own steps of round k have
changed::

    x_i      ← c^k + u_i^k                          at the end of round k
    c^{k+1}  = c^k + Σ_i w_i^k u_i^k / Σ_i w_i^k    or an outer step, with the negative mean for its gradient

The central model reaches a rank at the end of its round k; but a rank at its greatest staleness, too early in its round
to hand anything over, waits for it and then goes on with the round. Where all ranks had closed they go on from the same
central model. An update that is not finite has weight 0; its rank goes on from the central model, with nothing kept.

Nothing of the exchange is used (no payload, driver, or engine), so that a run and its replay can only agree if both
follow the formulas.

References:
    [NoDelay] Talyansky et al., "Asynchronous SGD without gradient delay", ICLR 2019 submission.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_abs.core.scaling import Scaling
from horovod_abs.formulas import Arrays, Gradients, Learner, Moments, clipped
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch, RecordedRound, ReplayError


@dataclass(frozen=True)
class UpdateRules:
    """How updates are made and averaged; the names are those of ``DistributedOptimizer`` and ``ModelUpdates``."""

    max_staleness: int = 16
    weighting: str = "samples"
    average_state: bool = False
    outer: Any = None
    min_micro_batches: int = 1
    clip_grad_norm: float | None = None
    loss_reduction: str = "mean"
    scaling: Scaling = field(default_factory=Scaling)

    @classmethod
    def of(cls, log: RunLog) -> UpdateRules:
        """Those of a recorded run. Raises :class:`ReplayError` if it had an outer optimizer, which no log holds."""
        exchange, options = log.run.exchange, log.run.options
        if exchange["outer"] is not None:
            raise ReplayError(
                f"{log.path}: the log names the outer optimizer {exchange['outer']}, but does not hold it"
            )
        return cls(
            max_staleness=exchange["max_staleness"],
            weighting=exchange["weighting"],
            average_state=exchange["average_state"],
            min_micro_batches=options["min_micro_batches"],
            clip_grad_norm=options["clip_grad_norm"],
            loss_reduction=options["loss_reduction"],
            scaling=Scaling(**options["scaling"]),
        )


def compute(rounds: Sequence[RecordedRound], learner: Learner, rules: UpdateRules) -> list[Arrays]:
    """Train by recorded rounds; the model ends as the central one.

    Args:
        rounds: What was computed. A micro-batch without samples counts, and is not stepped on.
        learner: The model with its first parameters, and an optimizer as it is at first on every rank.
        rules: How updates are made and averaged.

    Returns:
        The central model after each round.
    """
    central = _Central(learner, rules)
    ranks = [_Rank(learner, rules) for _ in (rounds[0].micro_batches if rounds else ())]
    history: list[Arrays] = []
    rates: Sequence[float] | None = None
    for number, round in enumerate(rounds):
        updates: list[_Update] = []
        for rank, micro_batches in zip(ranks, round.micro_batches, strict=True):
            rank.resume()
            if number == 0 or round.drained:
                rank.arrive(central)
            rank.wait_at_bound(central, 0)
            for done, indices in enumerate(micro_batches, start=1):
                if indices:
                    rank.step(indices, round.learning_rates if rank.arrived else rates, len(ranks))
                rank.wait_at_bound(central, done)
            updates.append(rank.hand_over(central, round, len(updates)))
        central.merge(updates)
        history.append(central.parameters)
        rates = round.learning_rates
    learner.set_parameters(central.parameters)
    return history


@dataclass
class _Update:
    """What a rank hands over: the change of its model, and what its optimizer keeps."""

    weight: float
    change: Arrays
    kept: Moments


class _Central:
    """The central model.

    Attributes:
        parameters: Its parameters.
        mean_state: The mean of what the ranks' optimizers had kept, with the last update that was merged.
    """

    def __init__(self, learner: Learner, rules: UpdateRules) -> None:
        self.parameters = learner.parameters()
        self.mean_state: Moments = {}
        self._outer = learner.outer(rules.outer) if rules.outer else None

    def merge(self, updates: Sequence[_Update]) -> None:
        self.mean_state = {}
        total = sum(update.weight for update in updates)
        if total == 0:
            return
        shares = [(update, update.weight / total) for update in updates if update.weight]
        means: Arrays = [
            np.sum([each.change[i] * share for each, share in shares], axis=0) for i in range(len(self.parameters))
        ]
        if self._outer is not None:
            self.parameters = self._outer([-mean for mean in means])
        else:
            self.parameters = [x + mean for x, mean in zip(self.parameters, means, strict=True)]
        keys = {key for each, _ in shares for key in each.kept}
        self.mean_state = {
            key: np.sum([each.kept[key] * share for each, share in shares if key in each.kept], axis=0) for key in keys
        }


class _Rank:
    """One rank: parameters and an optimizer's state of its own, which the learner has while it computes.

    Attributes:
        arrived: Whether all exchanges before this round have reached the rank.
        in_flight: Micro-batches of the round before, if they are not in the central model that it has seen.
    """

    def __init__(self, learner: Learner, rules: UpdateRules) -> None:
        self.arrived = False
        self.in_flight = 0
        self._learner = learner
        self._rules = rules
        self._start = learner.parameters()
        self._state = learner.state()
        self._steps = 0

    def resume(self) -> None:
        """Compute from here on."""
        self._learner.set_parameters(self._start)
        self._learner.set_state(self._state)

    def step(self, indices: MicroBatch, rates: Sequence[float] | None, ranks: int) -> None:
        gradients: Gradients = self._learner.gradients(indices)
        if self._rules.loss_reduction == "sum":
            gradients = [None if g is None else g / len(indices) for g in gradients]
        factor = self._rules.scaling.factor(ranks, self._steps)
        self._learner.step(clipped(gradients, self._rules.clip_grad_norm), factor, rates)
        self._steps += 1

    def wait_at_bound(self, central: _Central, done: int) -> None:
        """With so many micro-batches the rank may do no more, and has too little to hand over."""
        stale = self.in_flight + done >= self._rules.max_staleness
        if stale and done < self._rules.min_micro_batches and not self.arrived:
            self.arrive(central)

    def arrive(self, central: _Central) -> None:
        """The central model reaches the rank in mid-round."""
        self._go_on_from(central, self._change())
        self._start = central.parameters
        self._learner.set_moments(central.mean_state)
        self.arrived, self.in_flight = True, 0

    def hand_over(self, central: _Central, round: RecordedRound, number: int) -> _Update:
        """The round ends."""
        samples = round.samples(number)
        update = _Update(
            weight=samples if self._rules.weighting == "samples" else float(samples > 0),
            change=self._change(),
            kept=self._learner.moments() if self._rules.average_state else {},
        )
        if not self.arrived:
            self._learner.set_moments(central.mean_state)
        if not _finite((*update.change, *update.kept.values())):
            update = _Update(0.0, [np.zeros_like(x) for x in self._start], {})
            if not _finite(self._learner.moments().values()):
                self._learner.forget()
        self._go_on_from(central, update.change)
        self._start, self._state = self._learner.parameters(), self._learner.state()
        self.arrived, self.in_flight = False, len(round.micro_batches[number])
        return update

    def _change(self) -> Arrays:
        return [x - start for x, start in zip(self._learner.parameters(), self._start, strict=True)]

    def _go_on_from(self, central: _Central, change: Arrays) -> None:
        self._learner.set_parameters([x + own for x, own in zip(central.parameters, change, strict=True)])


def _finite(arrays: Iterable[NDArray[np.float64]]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)
