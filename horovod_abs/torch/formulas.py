"""A PyTorch model and its optimizer for the formulas that a run must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod_abs import formulas, formulas_updates
from horovod_abs.formulas import Arrays, Gradients, Moments, Rules
from horovod_abs.formulas_updates import UpdateRules
from horovod_abs.observe.schedule import MicroBatch, RecordedRound

__all__ = ["Learner", "Rules", "UpdateRules", "compute"]

Loss = Callable[[torch.nn.Module, MicroBatch], torch.Tensor]


def compute(
    rounds: Sequence[RecordedRound],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    rules: Rules | UpdateRules,
    *,
    after_merge: Callable[[], object] | None = None,
) -> list[Arrays]:
    """Train ``model`` by recorded rounds.

    Args:
        rounds: What was computed.
        model: The model with its first parameters.
        optimizer: A plain optimizer of it, as it is at first on every rank.
        loss: The loss of the samples with some indices.
        rules: How gradients become updates, or updates are averaged.
        after_merge: Called after each update; for gradients.

    Returns:
        The central model after each round; for model updates.
    """
    learner = Learner(model, optimizer, loss)
    if isinstance(rules, UpdateRules):
        return formulas_updates.compute(rounds, learner, rules)
    formulas.compute(rounds, learner, rules, after_merge=after_merge)
    return []


class Learner:
    """See :class:`horovod_abs.formulas.Learner`.

    Args:
        model: The model.
        optimizer: A plain optimizer of it.
        loss: The loss of the samples with some indices.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.optimizer = optimizer
        self._model = model
        self._loss = loss
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def parameters(self) -> Arrays:
        return [_array(p) for p in self._parameters]

    @torch.no_grad()
    def set_parameters(self, values: Arrays) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(torch.from_numpy(value))

    def gradients(self, indices: MicroBatch) -> Gradients:
        self._model.zero_grad()
        torch.autograd.backward(self._loss(self._model, indices))
        found = [None if p.grad is None else _array(p.grad) for p in self._parameters]
        self._model.zero_grad()
        return found

    def step(self, gradients: Gradients, factor: float, rates: Sequence[float] | None) -> None:
        groups = self.optimizer.param_groups
        rates = rates or [group["lr"] for group in groups]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.as_tensor(gradient).to(parameter)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad()

    def state(self) -> Any:
        return copy.deepcopy(self.optimizer.state_dict())

    def set_state(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def moments(self) -> Moments:
        return {
            (index, name): _array(value)
            for index, parameter in enumerate(self._parameters)
            for name, value in self.optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    def set_moments(self, moments: Moments) -> None:
        for index, parameter in enumerate(self._parameters):
            for name, kept in self.optimizer.state[parameter].items():
                if (index, name) in moments:
                    kept.copy_(torch.from_numpy(moments[index, name]))

    def forget(self) -> None:
        self.optimizer.state.clear()

    def outer(self, make: Any) -> Callable[[Arrays], Arrays]:
        parameters = [p.detach().clone() for p in self._parameters]
        optimizer = make(parameters)

        def step(gradients: Arrays) -> Arrays:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = torch.from_numpy(gradient).to(parameter)
            optimizer.step()
            return [_array(p) for p in parameters]

        return step


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float64, copy=True).numpy()
