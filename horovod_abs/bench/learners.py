"""Real models for the strategies of :mod:`horovod_abs.sim.servers` and :mod:`horovod_abs.sim.eager`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

Gradients = Callable[[nn.Module], object]
"""Leaves the gradients of the next micro-batch in a model."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Central:
    """A model on a parameter server, whose optimizer holds the momentum, and a copy on each worker.

    Args:
        model: To begin with.
        size: Number of workers.
        gradients: Computes gradients.
        optimizer: Makes the server's optimizer.
        compensation: λ of delay compensation, by which the server adds λ g⊙g⊙(w − w_bak) to a gradient g that was taken
            at w_bak; ``adaptive`` divides λ by the root of the running mean of g⊙g.
        strength: λ, or λ₀ of the adaptive form.

    References:
        Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", arXiv 1609.08326, section 5.
    """

    MEAN, SMALL = 0.95, 1e-7

    def __init__(
        self,
        model: nn.Module,
        size: int,
        gradients: Gradients,
        optimizer: MakeOptimizer,
        *,
        compensation: Literal["constant", "adaptive"] | None = None,
        strength: float = 0.04,
    ) -> None:
        self.model = model
        self.copies = [copy.deepcopy(model) for _ in range(size)]
        self._gradients = gradients
        self._optimizer = optimizer(model)
        self.optimizers = [self._optimizer]
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._compensation = compensation
        self._strength = strength
        self._mean_square = [torch.zeros_like(p) for p in self._parameters]
        self._clear()

    def pull(self, rank: int) -> None:
        with torch.no_grad():
            for own, central in zip(self.copies[rank].parameters(), self._parameters, strict=True):
                own.copy_(central)

    def compute(self, rank: int) -> None:
        self._gradients(self.copies[rank])

    def give(self, rank: int) -> None:
        own = list(self.copies[rank].parameters())
        with torch.no_grad():
            gradients = [p.grad for p in own if p.grad is not None]
            if self._compensation:
                gradients = self._compensated(gradients, own)
            torch._foreach_add_(self._sum, gradients)
            for buffer, given in zip(self._buffers, self.copies[rank].buffers(), strict=True):
                buffer.copy_(given)

    def update(self, count: int) -> None:
        torch._foreach_div_(self._sum, float(count))
        for parameter, gradient in zip(self._parameters, self._sum, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._clear()

    def _compensated(self, gradients: list[torch.Tensor], old: list[nn.Parameter]) -> list[torch.Tensor]:
        compensated = []
        for gradient, now, then, mean in zip(gradients, self._parameters, old, self._mean_square, strict=True):
            square = gradient * gradient
            strength: torch.Tensor | float = self._strength
            if self._compensation == "adaptive":
                mean.mul_(self.MEAN).add_(square, alpha=1 - self.MEAN)
                strength = self._strength / (mean + self.SMALL).sqrt()
            compensated.append(gradient + strength * square * (now - then))
        return compensated

    def _clear(self) -> None:
        self._sum = [torch.zeros_like(p) for p in self._parameters]


class Replicated:
    """A model and an optimizer on each worker, and the sum of the gradients that it has not given away.

    Args:
        model: To begin with; worker 0's.
        size: Number of workers.
        gradients: Computes gradients.
        optimizer: Makes a worker's optimizer.
    """

    def __init__(self, model: nn.Module, size: int, gradients: Gradients, optimizer: MakeOptimizer) -> None:
        self.model = model
        self._models = [model, *(copy.deepcopy(model) for _ in range(size - 1))]
        self.optimizers = [optimizer(each) for each in self._models]
        self._gradients = gradients
        self._held = [[torch.zeros_like(p) for p in each.parameters()] for each in self._models]

    def compute(self, rank: int) -> None:
        self._gradients(self._models[rank])
        gradients = [p.grad for p in self._models[rank].parameters() if p.grad is not None]
        torch._foreach_add_(self._held[rank], gradients)

    def collect(self) -> list[torch.Tensor]:
        mean = [torch.stack(of_all).mean(0) for of_all in zip(*self._held, strict=True)]
        for held in self._held:
            torch._foreach_zero_(held)
        return mean

    def apply(self, rank: int, gradient: list[torch.Tensor]) -> None:
        for parameter, mean in zip(self._models[rank].parameters(), gradient, strict=True):
            parameter.grad = mean.clone()
        self.optimizers[rank].step()

    def average(self) -> None:
        with torch.no_grad():
            for of_all in zip(*(each.state_dict().values() for each in self._models), strict=True):
                mean = torch.stack([tensor.double() for tensor in of_all]).mean(0)
                for tensor in of_all:
                    tensor.copy_(mean)
