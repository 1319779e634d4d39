"""How gradients cope with being applied one round after the parameters that they were taken at."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class AsPublished:
    """Do nothing about it."""

    launches_first = True

    def begin(self) -> None:
        """A round without one before it is about to be launched."""

    def before_update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A merge is about to update the parameters, with these mean gradients; ``None`` for each if it is empty."""

    def predict(self, gradients: Callable[[], Sequence[torch.Tensor | None]], step: Callable[[], object]) -> None:
        """A round that holds gradients of this rank is about to be launched.

        Args:
            gradients: Makes this rank's own mean gradients of that round.
            step: Takes a step of the user's optimizer.
        """

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        """While inside, the parameters are those that all ranks share."""
        yield


class Taylor(AsPublished):
    """Compensate to first order: λ ḡ⊙ḡ⊙(x_k − x_{k−1}) is added to the mean gradient ḡ, taken at x_{k−1}.

    Keeps one model-sized copy, x_{k−1}.

    Args:
        parameters: The parameters that are updated.
        strength: λ.

    References:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv 1609.08326, equation 10.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], strength: float) -> None:
        self._parameters = list(parameters)
        self._strength = strength
        self._taken_at = _copies(self._parameters)

    def begin(self) -> None:
        _copy(self._parameters, self._taken_at)

    @torch.no_grad()
    def before_update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for gradient, parameter, taken_at in zip(gradients, self._parameters, self._taken_at, strict=True):
            if gradient is not None:
                gradient.addcmul_(gradient * gradient, parameter - taken_at, value=self._strength)
        _copy(self._parameters, self._taken_at)


class Lookahead(AsPublished):
    """Take the next round's gradients at a predicted model: x plus the step that this rank's own gradient would cause.

    The prediction is undone before the merge, by copy, and everything that the local step changed in the optimizer
    right after it. A rank without a gradient of its own predicts x itself. Keeps one model-sized copy, x; a copy of
    the optimizer's state lives only during the local step.

    Args:
        parameters: The parameters that are updated.
        optimizer: The user's optimizer.
    """

    launches_first = False

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._authoritative = _copies(self._parameters)
        self._ahead = False

    def before_update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._ahead:
            _copy(self._authoritative, self._parameters)
            self._ahead = False

    def predict(self, gradients: Callable[[], Sequence[torch.Tensor | None]], step: Callable[[], object]) -> None:
        _copy(self._parameters, self._authoritative)
        self._ahead = True
        for parameter, gradient in zip(self._parameters, gradients(), strict=True):
            parameter.grad = gradient
        with put_back(self._optimizer, self._parameters[0].device):
            step()
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        if not self._ahead:
            yield
            return
        predicted = _copies(self._parameters)
        _copy(self._authoritative, self._parameters)
        try:
            yield
        finally:
            _copy(predicted, self._parameters)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(target), list(source))


@contextmanager
def put_back(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Let a step change what it will, and put all but the parameters back: state, options, attributes, RNG.

    The step works on a copy of the state, so that the state itself keeps its bits and its identity.
    """
    attributes = dict(vars(optimizer))
    options = [dict(group) for group in optimizer.param_groups]
    random = torch.get_rng_state()
    cuda_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    state = {parameter: copy.deepcopy(kept) for parameter, kept in optimizer.state.items()}
    optimizer.state = defaultdict(dict, state)
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                group[name] = copy.deepcopy(value)
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, kept in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(kept)
        torch.set_rng_state(random)
        if cuda_random is not None:
            torch.cuda.set_rng_state(cuda_random, device)
