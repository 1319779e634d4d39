"""What is averaged: the choice that a user makes with ``exchange=``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class Gradients:
    """Average gradients: ABS-SGD exactly as published.

    The sum of per-sample gradients and the number of samples are summed over ranks; the mean is applied
    ``delay`` rounds later::

        x_{k+1} = x_k − η · ḡ^{k−1},    ḡ^k = (Σ_i Σ_samples ∇ℓ(x_k)) / N^k

    >>> optimizer = hvd.DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), exchange=Gradients(staleness="lookahead")
    ... )

    Args:
        delay: 1 computes on while gradients are exchanged; 0 waits for them (synchronous, weighted by samples).
        staleness: How a delay of one round is made up for. ``None``: not at all, as published. ``"taylor"``:
            λ ḡ⊙ḡ⊙(x_k − x_{k−1}) is added to the mean gradient. ``"lookahead"``: the next round's gradients are taken
            at a predicted model, the shared one plus the step that this rank's own gradient in flight would cause;
            see ``optimizer.authoritative()``. Each keeps one model-sized copy.
        taylor_lambda: λ of ``"taylor"``.

    Raises:
        ValueError: ``delay`` is neither 0 nor 1, an unknown ``staleness``, or one without a delay.

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164, section 3; Zheng et al., arXiv 1609.08326 (``"taylor"``).
    """

    delay: int = 1
    staleness: Literal["taylor", "lookahead"] | None = None
    taylor_lambda: float = 0.04
    max_staleness: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.delay not in (0, 1):
            raise ValueError(f"Gradients takes delay=0 or delay=1, not {self.delay!r}")
        if self.staleness not in (None, "taylor", "lookahead"):
            raise ValueError(f"staleness must be None, 'taylor' or 'lookahead', not {self.staleness!r}")
        if self.staleness and self.delay == 0:
            raise ValueError(f"staleness={self.staleness!r} makes up for a delay, and delay=0 has none: leave it out")


OuterOptimizer = Callable[[list[Any]], Any]
"""Makes an optimizer, of the framework in use, from a list of its tensors or variables."""


@dataclass(frozen=True, repr=False)
class ModelUpdates:
    """Average model updates: asynchronous SGD without gradient delay.

    Each rank steps with its own gradients, on every micro-batch. What its steps have changed during a round is
    averaged over ranks while it goes on stepping, and added to a central model that all ranks share. With
    ``SyncClock`` this is the paper's algorithm 1, in which a rank waits only when its staleness reaches τ; with
    ``CountClock(β)`` and τ = 2β its algorithm 2.

    With ``outer`` the mean update is not added but taken, negated, for the gradient of a further optimizer: in
    today's terms DiLoCo with eager updates (arXiv 2311.08105, 2502.12996), here driven by a clock and weighted. At
    an outer learning rate of 1 without momentum it is the paper's rule.

    Besides the model there are three copies of its size: the central model, the model that the round started from, and
    the update in flight. ``clip_grad_norm`` clips each micro-batch's own gradient.

    >>> local = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    >>> optimizer = hvd.DistributedOptimizer(local, exchange=ModelUpdates(max_staleness=8))

    Args:
        max_staleness: τ: a rank waits when it has taken so many steps that are not in the central model it has seen;
            at least ``min_micro_batches``, and at least n of a ``CountClock(n)``.
        weighting: ``"samples"`` weighs each rank's update by its samples in the round; ``"workers"`` is the paper's
            plain mean over the ranks that took a step.
        average_state: At each merge replace what the user's optimizer keeps for each parameter (momentum, Adam's
            moments) by its mean over ranks, as it was a round ago; costs as much memory as that state. Otherwise it
            stays each rank's own, in checkpoints too.
        outer: Makes the outer optimizer from a list of tensors (TensorFlow: variables), e.g.
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.

    Raises:
        ValueError: ``max_staleness`` below 1 or an unknown ``weighting``.
        TypeError: ``outer`` cannot be called.

    References:
        [NoDelay] Talyansky, Kisilev, Melamed, Peterfreund, Verner, ICLR 2019 submission.
    """

    max_staleness: int = 16
    weighting: Literal["samples", "workers"] = "samples"
    average_state: bool = False
    outer: OuterOptimizer | None = None
    delay: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.max_staleness, int) or self.max_staleness < 1:
            raise ValueError(f"max_staleness must be a whole number of at least 1, not {self.max_staleness!r}")
        if self.weighting not in ("samples", "workers"):
            raise ValueError(f"weighting must be 'samples' or 'workers', not {self.weighting!r}")
        if self.outer is not None and not callable(self.outer):
            raise TypeError(
                f"outer must make an optimizer from tensors, e.g. functools.partial(torch.optim.SGD, lr=0.7), "
                f"not {type(self.outer).__name__}"
            )

    def __repr__(self) -> str:
        """The same on every rank, which an address in memory would not be."""
        return (
            f"ModelUpdates(max_staleness={self.max_staleness}, weighting={self.weighting!r}, "
            f"average_state={self.average_state}, outer={name_of(self.outer)})"
        )


Exchange = Gradients | ModelUpdates


def name_of(thing: Any) -> str:
    """What a function is called, with its arguments where they are bound: the same on every rank."""
    if isinstance(thing, functools.partial):
        arguments = [repr(value) for value in thing.args]
        arguments += [f"{name}={value!r}" for name, value in sorted(thing.keywords.items())]
        return f"{name_of(thing.func)}({', '.join(arguments)})"
    return str(getattr(thing, "__qualname__", None if thing is None else type(thing).__qualname__))


def described(exchange: Exchange) -> dict[str, Any]:
    """The exchange and its options as plain values, for a run log."""
    values = {field.name: getattr(exchange, field.name) for field in fields(exchange)}
    plain = {name: name_of(value) if callable(value) else value for name, value in values.items()}
    return {"name": type(exchange).__name__, **plain}
