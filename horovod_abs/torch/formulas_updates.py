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

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch, RecordedRound, ReplayError

Tensors = list[torch.Tensor]
Loss = Callable[[torch.nn.Module, MicroBatch], torch.Tensor]


@dataclass(frozen=True)
class UpdateRules:
    """How updates are made and averaged; the names are those of ``DistributedOptimizer`` and ``ModelUpdates``."""

    max_staleness: int = 16
    weighting: str = "samples"
    average_state: bool = False
    outer: Callable[[Tensors], torch.optim.Optimizer] | None = None
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


def compute(
    rounds: Sequence[RecordedRound],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    rules: UpdateRules,
) -> list[Tensors]:
    """Train ``model`` by recorded rounds; it ends as the central model.

    Args:
        rounds: What was computed. A micro-batch without samples counts, and is not stepped on.
        model: The model with its first parameters.
        optimizer: A plain optimizer of it, as it is at first on every rank.
        loss: The loss of the samples with some indices.
        rules: How updates are made and averaged.

    Returns:
        The central model after each round.
    """
    central = _Central(_trained(optimizer), rules)
    ranks = [_Rank(*copy.deepcopy((model, optimizer)), rules) for _ in (rounds[0].micro_batches if rounds else ())]
    history: list[Tensors] = []
    rates: Sequence[float] | None = None
    for number, round in enumerate(rounds):
        updates: list[_Update] = []
        for rank, micro_batches in zip(ranks, round.micro_batches, strict=True):
            if number == 0 or round.drained:
                rank.arrive(central)
            rank.wait_at_bound(central, 0)
            for done, indices in enumerate(micro_batches, start=1):
                if indices:
                    value = loss(rank.model, indices)
                    rank.step(value, len(indices), round.learning_rates if rank.arrived else rates, len(ranks))
                rank.wait_at_bound(central, done)
            updates.append(rank.hand_over(central, round, len(updates)))
        central.merge(updates)
        history.append(_copies(central.parameters))
        rates = round.learning_rates
    return history


@dataclass
class _Update:
    """What a rank hands over: the change of its model, and what its optimizer keeps by parameter and name."""

    weight: float
    change: Tensors
    kept: dict[tuple[int, str], torch.Tensor]


class _Central:
    """The central model.

    Attributes:
        parameters: Those of the model that is trained.
        mean_state: The mean of what the ranks' optimizers had kept, with the last update that was merged.
    """

    def __init__(self, parameters: Tensors, rules: UpdateRules) -> None:
        self.parameters = parameters
        self.mean_state: dict[tuple[int, str], torch.Tensor] = {}
        self._outer = rules.outer(parameters) if rules.outer else None

    @torch.no_grad()
    def merge(self, updates: Sequence[_Update]) -> None:
        self.mean_state = {}
        total = sum(update.weight for update in updates)
        if total == 0:
            return
        for index, parameter in enumerate(self.parameters):
            mean = sum((each.change[index] * (each.weight / total) for each in updates), torch.zeros_like(parameter))
            if self._outer is None:
                parameter.add_(mean)
            else:
                parameter.grad = -mean
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()
        for key in {key for update in updates if update.weight for key in update.kept}:
            kept = [each.kept[key] * (each.weight / total) for each in updates if each.weight and key in each.kept]
            self.mean_state[key] = sum(kept[1:], kept[0])


class _Rank:
    """One rank: a model of its own, and an optimizer of it.

    Attributes:
        arrived: Whether all exchanges before this round have reached the rank.
        in_flight: Micro-batches of the round before, if they are not in the central model that it has seen.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rules: UpdateRules) -> None:
        self.model = model
        self.arrived = False
        self.in_flight = 0
        self._optimizer = optimizer
        self._rules = rules
        self._parameters = _trained(optimizer)
        self._start = _copies(self._parameters)
        self._steps = 0

    def step(self, loss: torch.Tensor, samples: int, rates: Sequence[float] | None, ranks: int) -> None:
        self._optimizer.zero_grad()
        (loss if self._rules.loss_reduction == "mean" else loss / samples).backward()
        if self._rules.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._rules.clip_grad_norm)
        groups = self._optimizer.param_groups
        kept = rates or [group["lr"] for group in groups]
        for group, rate in zip(groups, kept, strict=True):
            group["lr"] = rate * self._rules.scaling.factor(ranks, self._steps)
        self._optimizer.step()
        for group, rate in zip(groups, kept, strict=True):
            group["lr"] = rate
        self._steps += 1

    def wait_at_bound(self, central: _Central, done: int) -> None:
        """With so many micro-batches the rank may do no more, and has too little to hand over."""
        stale = self.in_flight + done >= self._rules.max_staleness
        if stale and done < self._rules.min_micro_batches and not self.arrived:
            self.arrive(central)

    def arrive(self, central: _Central) -> None:
        """The central model reaches the rank in mid-round."""
        self._go_on_from(central, self._change())
        self._start = _copies(central.parameters)
        self._take_state(central)
        self.arrived, self.in_flight = True, 0

    def hand_over(self, central: _Central, round: RecordedRound, number: int) -> _Update:
        """The round ends."""
        samples = round.samples(number)
        update = _Update(
            weight=samples if self._rules.weighting == "samples" else float(samples > 0),
            change=self._change(),
            kept=self._kept() if self._rules.average_state else {},
        )
        if not self.arrived:
            self._take_state(central)
        if not _finite((*update.change, *update.kept.values())):
            update = _Update(0.0, [torch.zeros_like(p) for p in self._parameters], {})
            if not _finite(self._kept().values()):
                self._optimizer.state.clear()
        self._go_on_from(central, update.change)
        self._start = _copies(self._parameters)
        self.arrived, self.in_flight = False, len(round.micro_batches[number])
        return update

    def _change(self) -> Tensors:
        return [p.detach() - start for p, start in zip(self._parameters, self._start, strict=True)]

    @torch.no_grad()
    def _go_on_from(self, central: _Central, change: Tensors) -> None:
        for parameter, shared, own in zip(self._parameters, central.parameters, change, strict=True):
            parameter.copy_(shared + own)

    def _kept(self) -> dict[tuple[int, str], torch.Tensor]:
        return {
            (index, name): value.clone()
            for index, parameter in enumerate(self._parameters)
            for name, value in self._optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    def _take_state(self, central: _Central) -> None:
        for (index, name), value in central.mean_state.items():
            kept = self._optimizer.state[self._parameters[index]]
            if name in kept:
                kept[name].copy_(value)


def _trained(optimizer: torch.optim.Optimizer) -> Tensors:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _copies(tensors: Tensors) -> Tensors:
    return [tensor.detach().clone() for tensor in tensors]
