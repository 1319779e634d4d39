"""What is averaged: the choice that a user makes with ``exchange=``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gradients:
    """Average gradients: ABS-SGD exactly as published.

    The sum of per-sample gradients and the number of samples are summed over ranks; the mean is applied
    ``delay`` rounds later::

        x_{k+1} = x_k − η · ḡ^{k−1},    ḡ^k = (Σ_i Σ_samples ∇ℓ(x_k)) / N^k

    Args:
        delay: 1 computes on while gradients are exchanged; 0 waits for them (synchronous, weighted by samples).

    Raises:
        ValueError: ``delay`` is neither 0 nor 1.

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164, section 3.
    """

    delay: int = 1

    def __post_init__(self) -> None:
        if self.delay not in (0, 1):
            raise ValueError(f"Gradients takes delay=0 or delay=1, not {self.delay!r}")
