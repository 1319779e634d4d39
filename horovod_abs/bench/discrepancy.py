"""How far the workers' models are from each other: averaging model updates against delaying gradients.

The figure of [NoDelay]: the mean distance of the workers' models from their average. Averaging model updates it grows
with the staleness τ and not with the number of workers (lemma 3.3); if gradients are applied late, one after the other,
the models that workers compute at lie as far apart as there are workers.

Real gradients of a small network on real MNIST images, in virtual time, on one processor. Each worker has images of its
own, as many as every other and whatever the number of workers, and all are equally fast.

- *Model updates*: algorithm 2, by the production code: rounds of τ/2 steps, exchanges that take half a round.
- *Gradient delay*: workers take turns. Each reads the model, and when its turn comes again the gradient that it took
  there is applied: W workers, a delay of W − 1 steps.

References:
    [NoDelay] Talyansky et al., "Asynchronous SGD without gradient delay", ICLR 2019 submission.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import CountClock
from horovod_abs.examples import mnist
from horovod_abs.observe.progress import open_bar
from horovod_abs.torch.exchanges import ModelUpdates

MICRO_BATCH = 25
"""Samples."""
IMAGES = 125
"""Of each worker."""
LEARNING_RATE = 0.01
"""So low that gradients hardly change within τ steps."""
MOST_WORKERS = 32
"""For so many there are images."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        workers: Numbers of workers.
        staleness: Values of τ.
        begin: Steps before the first measurement: of each worker, and for gradient delay of all together.
        end: Steps until the last.
        seed: Of model, images and micro-batches.

    Raises:
        ValueError: a number is out of range, or no whole round would be measured.
    """

    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    staleness: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    begin: int = 48
    end: int = 144
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.workers or not all(2 <= number <= MOST_WORKERS for number in self.workers):
            raise ValueError(f"numbers of workers must be from 2 to {MOST_WORKERS}, got {self.workers}")
        if not self.staleness or min(self.staleness) < 1:
            raise ValueError(f"every staleness must be at least 1, got {self.staleness}")
        if self.begin < max(*self.workers, *self.staleness) or self.end < self.begin + max(self.staleness) / 2:
            raise ValueError(f"no whole round of all workers would be measured from step {self.begin} to {self.end}")


QUICK = Setting(workers=(2, 8, 32), staleness=(2, 8, 32), begin=32, end=64)


class _Network(nn.Sequential):
    """25,450 parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


class _Workers:
    """What the workers start with: equal models, unequal images."""

    def __init__(self, number: int, seed: int) -> None:
        images, labels = mnist.load(seed=seed)[0].tensors
        torch.manual_seed(seed)
        model = _Network()
        self.models = [copy.deepcopy(model) for _ in range(number)]
        self._random = [np.random.default_rng((seed, worker)) for worker in range(number)]
        self._order: list[list[torch.Tensor]] = [[] for _ in range(number)]
        self._shards = [
            (images[first : first + IMAGES], labels[first : first + IMAGES])
            for first in range(0, number * IMAGES, IMAGES)
        ]

    def gradients(self, worker: int) -> float:
        """Leave the gradients of one micro-batch of a worker in its model."""
        images, labels = self._shards[worker]
        if not self._order[worker]:
            passes = self._random[worker].permutation(IMAGES).reshape(-1, MICRO_BATCH)
            self._order[worker] = [torch.from_numpy(batch) for batch in passes]
        chosen = self._order[worker].pop()
        model = self.models[worker]
        model.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        return float(MICRO_BATCH)

    def vector(self, worker: int) -> torch.Tensor:
        """A worker's model."""
        return nn.utils.parameters_to_vector(self.models[worker].parameters()).detach()


def _distance(vectors: Sequence[torch.Tensor]) -> float:
    """Mean distance from the average."""
    stacked = torch.stack(list(vectors))
    return float((stacked - stacked.mean(0)).norm(dim=1).mean())


def of_model_updates(workers: int, staleness: int, setting: Setting) -> float:
    """Mean distance of so many workers' models from their average, after each of their steps."""
    cluster = _Workers(workers, setting.seed)
    beta = max(1, staleness // 2)
    ranks = [
        VirtualRank(
            model,
            torch.optim.SGD(model.parameters(), LEARNING_RATE),
            lambda worker=worker: cluster.gradients(worker),  # type: ignore[misc]
            lambda: 1.0,
        )
        for worker, model in enumerate(cluster.models)
    ]
    training = VirtualTraining(ranks, ModelUpdates(staleness, "workers"), CountClock(beta), lambda exchange: beta / 2)
    found: list[float] = []
    stepped: list[torch.Tensor] = []

    def after_step(worker: int) -> None:
        if ranks[0].micro_batches > setting.begin:
            stepped.append(cluster.vector(worker))
        if len(stepped) == workers:  # all are equally fast: each has taken the same step
            found.append(_distance(stepped))
            stepped.clear()

    for worker, rank in enumerate(ranks):
        rank.optimizer.register_step_post_hook(lambda *_, worker=worker: after_step(worker))
    training.run(lambda rank: rank.micro_batches < setting.end)
    return float(np.mean(found))


def of_gradient_delay(workers: int, setting: Setting) -> float:
    """The same for workers that take turns in applying a gradient, and in reading the model."""
    cluster = _Workers(workers, setting.seed)
    shared = copy.deepcopy(cluster.models[0])
    optimizer = torch.optim.SGD(shared.parameters(), LEARNING_RATE)
    found: list[float] = []
    for step in range(setting.end):
        worker = step % workers
        cluster.gradients(worker)
        for parameter, read in zip(shared.parameters(), cluster.models[worker].parameters(), strict=True):
            parameter.grad = read.grad
        optimizer.step()
        cluster.models[worker].load_state_dict(shared.state_dict())
        if step >= setting.begin:
            found.append(_distance([cluster.vector(other) for other in range(workers)]))
    return float(np.mean(found))


def measure(setting: Setting) -> dict[str, Any]:
    """Measure all, and return the result as plain values."""
    updates, delay = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is small
    try:
        with open_bar(sum(setting.workers) * (len(setting.staleness) + 1)) as bar:
            for workers in setting.workers:
                for staleness in setting.staleness:
                    bar.set_description_str(f"{workers} workers, staleness {staleness} ", refresh=False)
                    distance = of_model_updates(workers, staleness, setting)
                    updates.append({"workers": workers, "staleness": staleness, "distance": distance})
                    bar.update(workers)
                delay.append({"workers": workers, "distance": of_gradient_delay(workers, setting)})
                bar.update(workers)
    finally:
        torch.set_num_threads(threads)
    return {"model_updates": updates, "gradient_delay": delay, **_shape(updates, delay), "setting": asdict(setting)}


def _shape(updates: Sequence[dict[str, Any]], delay: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the distances grow.

    Returns:
        ``linearity``, for each number of workers: R² of a straight line through distance against τ;
        ``growth``: distance with the most workers over that with the fewest, at the greatest τ and for gradient
        delay. The average of few workers lies among them: √(1 − 1/W) of the growth is owed to that.
    """
    by_workers = {
        workers: np.array([(each["staleness"], each["distance"]) for each in updates if each["workers"] == workers])
        for workers in sorted({each["workers"] for each in updates})
    }
    last = [points[points[:, 0].argmax(), 1] for points in by_workers.values()]
    by_delay = [each["distance"] for each in sorted(delay, key=lambda each: each["workers"])]
    return {
        "linearity": {
            str(workers): float(np.corrcoef(points.T)[0, 1] ** 2)
            for workers, points in by_workers.items()
            if len(points) > 2
        },
        "growth": {"model_updates": float(last[-1] / last[0]), "gradient_delay": by_delay[-1] / by_delay[0]},
    }


def to_table(result: dict[str, Any]) -> Table:
    """:func:`measure` for people."""
    growth = result["growth"]
    table = Table(
        title="Mean distance of the workers' models from their average",
        caption=f"from the fewest workers to the most: {growth['model_updates']:.2f}× for model updates, "
        f"{growth['gradient_delay']:.2f}× for gradient delay",
    )
    staleness = sorted({each["staleness"] for each in result["model_updates"]})
    table.add_column("workers", justify="right")
    for value in staleness:
        table.add_column(f"τ = {value}", justify="right")
    table.add_column("gradient delay", justify="right")
    for each in result["gradient_delay"]:
        row = {u["staleness"]: u["distance"] for u in result["model_updates"] if u["workers"] == each["workers"]}
        table.add_row(str(each["workers"]), *(f"{row[value]:.4f}" for value in staleness), f"{each['distance']:.4f}")
    return table


def draw(result: dict[str, Any]) -> Figure:
    """Distance against τ, and against the number of workers."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    updates = result["model_updates"]
    for workers in sorted({each["workers"] for each in updates}):
        points = [(each["staleness"], each["distance"]) for each in updates if each["workers"] == workers]
        left.plot(*zip(*points, strict=True), marker=".", label=f"{workers} workers")
    left.set(xlabel="staleness τ", ylabel="mean distance from the average", title="Model updates")
    for staleness in sorted({each["staleness"] for each in updates}, reverse=True):
        points = [(each["workers"], each["distance"]) for each in updates if each["staleness"] == staleness]
        right.plot(*zip(*points, strict=True), marker=".", label=f"model updates, τ = {staleness}")
    points = [(each["workers"], each["distance"]) for each in result["gradient_delay"]]
    right.plot(*zip(*points, strict=True), marker="o", color="black", linestyle="--", label="gradient delay")
    right.set(xlabel="workers", title="Model updates and gradient delay")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
