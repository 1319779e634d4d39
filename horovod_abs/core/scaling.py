"""Learning rate against batch size: none, linear or square root, with a warm-up counted in samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True)
class Scaling:
    """By what a learning rate tuned for one batch size is multiplied at another.

    With s = N / ``reference_batch_size`` the factor is 1, s or √s. During warm-up it moves from 1 to that value in
    proportion to the samples seen.

    >>> scaling = Scaling("linear", reference_batch_size=256, warmup_samples=1000)
    >>> [scaling.factor(batch=512, samples_seen=seen) for seen in (0, 500, 1000)]
    [1.0, 1.5, 2.0]

    Args:
        rule: ``"none"``, ``"linear"`` or ``"sqrt"``.
        reference_batch_size: Samples in the global batch that the learning rate was tuned for.
        warmup_samples: Samples over which the factor grows from 1 to its full value.

    Raises:
        ValueError: an unknown rule, a rule without a positive reference, or a negative warm-up.

    References:
        Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, section 2 (linear, gradual warm-up);
        Krizhevsky, "One weird trick", arXiv 1404.5997, section 5 (square root).
    """

    rule: Rule = "none"
    reference_batch_size: float | None = None
    warmup_samples: float = 0

    def __post_init__(self) -> None:
        if self.rule not in ("none", "linear", "sqrt"):
            raise ValueError(f"lr_scaling must be 'none', 'linear' or 'sqrt', not {self.rule!r}")
        if self.rule != "none" and not (self.reference_batch_size and self.reference_batch_size > 0):
            raise ValueError(
                f"lr_scaling={self.rule!r} needs reference_batch_size=, the global batch that the learning rate "
                f"was tuned for (got {self.reference_batch_size!r})"
            )
        if self.warmup_samples < 0:
            raise ValueError(f"warmup_samples must not be negative, got {self.warmup_samples!r}")

    def factor(self, batch: float, samples_seen: float) -> float:
        """The multiplier for a merge of ``batch`` samples when ``samples_seen`` were merged before it."""
        if self.rule == "none" or self.reference_batch_size is None:
            return 1.0
        scale = batch / self.reference_batch_size
        target = math.sqrt(scale) if self.rule == "sqrt" else scale
        if samples_seen >= self.warmup_samples:
            return target
        return 1.0 + (target - 1.0) * samples_seen / self.warmup_samples
