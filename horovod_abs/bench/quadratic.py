"""The smallest training problem: a parabola, on which one can work out how far the learning rate may go.

Each worker has a parabola of its own, ½ a (x − cᵢ)², all equally wide; the minima cᵢ lie around 0, so that the mean of
all is ½ a x² plus a constant. The workers train by the production code, in virtual time, equally fast and with a
micro-batch in each round: what comes out is the exchange's doing alone.

With a delay of one round, x_{k+1} = x_k + m (x_k − x_{k−1}) − η a x_{k−1} at momentum m. Its solutions are sums of zᵏ
with z² − (1 + m) z + (m + η a) = 0, and die out as long as both |z| < 1: for η a < 1 − m. Without a delay the equation
is z² − (1 + m − η a) z + m = 0, and the limit η a < 2 (1 + m).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from matplotlib.axes import Axes

from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import SyncClock
from horovod_abs.torch.exchanges import Exchange, Gradients, ModelUpdates

WAYS: Mapping[str, Exchange] = {
    "no delay": Gradients(delay=0),
    "as published": Gradients(),
    "taylor": Gradients(staleness="taylor"),
    "lookahead": Gradients(staleness="lookahead"),
    "model updates": ModelUpdates(),
}
"""The exchanges, by the names that they have in pictures."""

_FAR = 1e6
"""So far from the minimum at 0, from a beginning at 1, no run comes back."""
_REST = 1e-12
"""So near to it a run has come to rest."""


def roots(rate: float, momentum: float = 0.0, *, delay: int = 1) -> np.ndarray:
    """The two z of the recurrence; see the module.

    Args:
        rate: η a, the learning rate times the curvature.
        momentum: m.
        delay: 0 or 1.
    """
    if delay:
        return np.roots([1.0, -(1.0 + momentum), momentum + rate])
    return np.roots([1.0, -(1.0 + momentum - rate), momentum])


def limit(momentum: float = 0.0, *, delay: int = 1) -> float:
    """The η a from which on x no longer comes to rest; see the module."""
    return 1.0 - momentum if delay else 2.0 * (1.0 + momentum)


def descend(
    exchange: Exchange, rate: float, *, momentum: float = 0.0, steps: int = 40, workers: int = 2, spread: float = 0.5
) -> list[float]:
    """The model that all workers share, from x = 1 and after each merge, at a curvature of 1.

    Args:
        exchange: What is averaged.
        rate: The learning rate η, with a = 1.
        momentum: Of SGD.
        steps: Merges; fewer if x is no longer near anything.
        workers: How many.
        spread: How far apart the workers' minima lie; the outermost are at ± ``spread``.
    """
    parameters = [torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(workers)]
    minima = np.linspace(-spread, spread, workers) if workers > 1 else [0.0]
    ranks = [_worker(x, minimum, rate, momentum) for x, minimum in zip(parameters, minima, strict=True)]
    training = VirtualTraining(ranks, exchange, SyncClock(), lambda _: 0.5)
    path = [1.0]

    def look() -> None:
        with ranks[0].payload.authoritative():
            path.append(float(parameters[0].detach()))
        if len(path) > steps or abs(path[-1]) > _FAR:
            raise _Enough

    ranks[0].driver.on_merge.append(look)
    with suppress(_Enough):
        training.run(lambda _: True)
    return path


def comes_to_rest(path: Sequence[float]) -> bool:
    """Whether the swings have become clearly smaller from the second quarter to the last, or have died out.

    Clearly, because a compensated gradient is not linear: it may hold the swings at a size at which they stay.
    """
    size = np.abs(path)
    quarter = len(size) // 4
    late, early = size[-quarter:].max(), size[quarter : 2 * quarter].max()
    return bool(size[-1] < _FAR and (late < 0.9 * early or late < _REST))


def largest_rate(exchange: Exchange, *, momentum: float = 0.0, steps: int = 160, halvings: int = 10) -> float:
    """The largest learning rate at which x comes to rest, found by trying, to within 4.2 / 2**halvings."""
    low, high = 0.0, 4.2
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if comes_to_rest(descend(exchange, middle, momentum=momentum, steps=steps))
            else (
                low,
                middle,
            )
        )
    return (low + high) / 2


def draw_paths(axes: Axes, paths: Mapping[str, Sequence[float]], *, title: str = "", most: float = 2.0) -> None:
    """x against the number of merges, one line a way; what leaves the picture ends at its edge.

    Args:
        axes: Where to.
        paths: By name.
        title: Above it.
        most: The picture shows x from −most to most.
    """
    for name, path in paths.items():
        axes.plot(path, marker=".", markersize=4, linewidth=1.2, label=name)
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.set(xlabel="merge", title=title, ylim=(-most, most))
    axes.grid(alpha=0.3)


class _Enough(Exception):
    """The path is long enough, or leads nowhere."""


def _worker(x: torch.nn.Parameter, minimum: float, rate: float, momentum: float) -> VirtualRank:
    model = torch.nn.ParameterList([x])

    def gradients() -> float:
        x.grad = (x - minimum).detach()
        return 1.0

    return VirtualRank(model, torch.optim.SGD([x], rate, momentum), gradients, lambda: 1.0)
