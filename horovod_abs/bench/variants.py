"""Optimizers that are said to bear a gradient's delay of one round, to be tried with ours and the ideal machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class ErrorFeedback(torch.optim.SGD):
    """SGD that answers for a step taken one round too late.

    While the mean gradient of a round travels, the next gradients are taken as if the last step were repeated. When
    the true step u_k is known, the model is corrected by what the guess u_{k−1} was wrong, and the next guess made::

        y_{k+1} = y_k − u_k − (u_k − u_{k−1})

    References:
        Zmushko et al., arXiv 2606.30634, section 3 (as its abstract and reviews describe it: the text was not at hand).
    """

    def __init__(self, params: Any, lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay)
        self._last: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of SGD, and the correction."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        loss = super().step(closure)
        for parameter, old in zip(parameters, before, strict=True):
            moved = parameter - old
            parameter.add_(moved - self._last.get(parameter, torch.zeros_like(moved)))
            self._last[parameter] = moved
        return loss


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal, for all parameters that are matrices once flattened; SGD for the rest.

    PyTorch's own takes matrices only, and no kernels of convolutions. The step is scaled so that its root mean square
    is that of its rows, as in Jordan's.

    Args:
        params: Parameters.
        lr: Learning rate.
        momentum: Nesterov's.
        weight_decay: Decoupled.

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                step = parameter.grad + group["momentum"] * momentum
                if parameter.ndim >= 2:
                    matrix = orthogonal(step.flatten(1))
                    step = (max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5 * matrix).view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])
        return loss


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest matrix whose singular values are all 1, by Newton and Schulz's iteration of fifth order."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T
