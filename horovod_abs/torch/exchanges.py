"""What is averaged: the choice that a user makes with ``exchange=``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gradients:
    """Average gradients: ABS-SGD exactly as published.

    The sum of per-sample gradients and the number of samples are summed over ranks; the mean is applied
    ``delay`` rounds later::

        x_{k+1} = x_k − η · ḡ^{k−1},    ḡ^k = (Σ_i Σ_samples ∇ℓ(x_k)) / N^k

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

    def __post_init__(self) -> None:
        if self.delay not in (0, 1):
            raise ValueError(f"Gradients takes delay=0 or delay=1, not {self.delay!r}")
        if self.staleness not in (None, "taylor", "lookahead"):
            raise ValueError(f"staleness must be None, 'taylor' or 'lookahead', not {self.staleness!r}")
        if self.staleness and self.delay == 0:
            raise ValueError(f"staleness={self.staleness!r} makes up for a delay, and delay=0 has none: leave it out")
