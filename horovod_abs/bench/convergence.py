"""How long each way of training takes to a test accuracy: real training on MNIST images, in virtual time.

Ranks of unequal speed train a small convolutional network. Gradients, updates and averages are real, and made by the
production code; how long a micro-batch and an exchange take is said, so that the figure does not depend on the machine.
Evaluating takes no time.

All ways get the same effort: each is tried with the same learning rates and momenta and one seed, the best
:data:`FINALISTS` of them with all seeds, and the least median counts. A try may take :data:`HOPELESS` times as long as
the best before it, and is given up sooner where it is far behind: after a part f of its time it must be within
:data:`FAR` · (1/f − 1) of the target.

An exchange is hidden behind computing where the algorithm itself hides it, and where synchronous Horovod does: it sends
a gradient as soon as the backward pass has made it. The part of an exchange that fits between the moment at which all
ranks are in their last backward pass (two thirds of a micro-batch) and its end therefore costs nothing with
*synchronous* and *dynamic batches*, as if the gradients' first bytes could already be sent at that moment.

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164. [NoDelay] Talyansky et al., ICLR 2019 submission. Stich, "Local SGD
    converges fast and communicates little", arXiv 1805.09767. Tyagi and Sharma, "Taming resource heterogeneity in
    distributed ML training with dynamic batching", arXiv 2305.12213 (*dynamic batches*). Zheng et al.,
    arXiv 1609.08326 (*taylor*).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean, median
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import Clock, CountClock, Progress, SyncClock
from horovod_abs.examples import mnist
from horovod_abs.observe.progress import open_bar
from horovod_abs.observe.results import SMOOTHED
from horovod_abs.torch.exchanges import Exchange, Gradients, ModelUpdates

MICRO_BATCH = 16
"""Samples."""
EVALUATE_EVERY = 1000
"""Samples between two evaluations."""
FINALISTS = 2
"""So many pairs of learning rate and momentum are tried with more than one seed."""
HOPELESS = 1.5
"""A try may take so many times as long as the best before it; with another seed twice as many."""
FAR = 0.03
"""So far from the target a run is given up at half its time."""
BACKWARD = 2 / 3
"""Share of the backward pass in a micro-batch's time."""


class Network(nn.Sequential):
    """Two convolutions and a dense layer for MNIST images of half the size, 9,930 parameters, 1.4 ms for 16 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


class CountBySpeed(Clock):
    """A fixed number of micro-batches in a round, for each rank its own: what dynamic batches settle on.

    Args:
        counts: Micro-batches in a round, by rank.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)

    def is_due(self, progress: Progress) -> bool:
        return progress.micro_batches >= self.counts[progress.rank]

    def limit(self, progress: Progress) -> float:
        return self.counts[progress.rank]


class Way(NamedTuple):
    """A way of training.

    Attributes:
        exchange: What is averaged.
        clock: When a round ends.
        hidden: Seconds of each exchange that pass before its launch, behind the backward pass.
    """

    exchange: Exchange
    clock: Clock
    hidden: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        speeds: Of the ranks; one of speed 1 takes ``micro_batch`` seconds for a micro-batch.
        micro_batch: Seconds.
        exchanges: Seconds of an exchange: one comparison each.
        learning_rates: That each way is tried with, without momentum. With momentum m they are multiplied by 1 − m, so
            that a gradient moves the model as far in the long run.
        momenta: That each way is tried with, combined with each of the learning rates.
        target: Test accuracy to reach, the mean of the last three evaluations.
        seeds: Of data split, model and order; the median counts.
        limit: Seconds after which a run is given up.
        steps: H of local SGD, and β of algorithm 2.

    Raises:
        ValueError: a number is out of range.
    """

    speeds: tuple[float, ...] = (1.0, 1.0, 0.5, 0.25)
    micro_batch: float = 0.02
    exchanges: tuple[float, ...] = (0.02, 0.1, 0.25)
    learning_rates: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6)
    momenta: tuple[float, ...] = (0.0, 0.9)
    target: float = 0.95
    seeds: tuple[int, ...] = (0, 1, 2)
    limit: float = 90.0
    steps: int = 8

    def __post_init__(self) -> None:
        numbers = (*self.speeds, self.micro_batch, *self.exchanges, *self.learning_rates, self.limit, self.steps)
        lists = (self.speeds, self.exchanges, self.learning_rates, self.momenta, self.seeds)
        if not all(lists) or min(numbers) <= 0:
            raise ValueError(f"every number must be positive, and there must be one of each: {self}")
        if not all(0 <= momentum < 1 for momentum in self.momenta):
            raise ValueError(f"every momentum must be at least 0 and less than 1, got {self.momenta}")
        if not 0 < self.target < 1:
            raise ValueError(f"target must be between 0 and 1, got {self.target}")

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a micro-batch, by rank."""
        return tuple(self.micro_batch / speed for speed in self.speeds)

    def ways(self) -> dict[str, Way]:
        """The ways of training, by name."""
        ones = [1] * len(self.speeds)
        by_speed = [max(1, round(speed / min(self.speeds))) for speed in self.speeds]
        beta = CountClock(self.steps)
        return {
            "synchronous": Way(Gradients(delay=0), CountBySpeed(ones), self._hidden(ones)),
            "dynamic batches": Way(Gradients(delay=0), CountBySpeed(by_speed), self._hidden(by_speed)),
            f"local SGD, H = {self.steps}": Way(ModelUpdates(self.steps, "workers"), beta),
            "ABS-SGD as published": Way(Gradients(), SyncClock()),
            "ABS-SGD, taylor": Way(Gradients(staleness="taylor"), SyncClock()),
            "ABS-SGD, lookahead": Way(Gradients(staleness="lookahead"), SyncClock()),
            f"model updates, algorithm 2, β = {self.steps}": Way(ModelUpdates(2 * self.steps, "workers"), beta),
            "model updates, SyncClock": Way(ModelUpdates(64), SyncClock()),
        }

    def tries(self) -> list[tuple[float, float]]:
        """Pairs of learning rate and momentum, from the middle of the list outwards: the sooner one is good, the better
        can others be given up.
        """
        middle = (len(self.learning_rates) - 1) / 2
        order = sorted(range(len(self.learning_rates)), key=lambda index: abs(index - middle))
        pairs = product((self.learning_rates[index] for index in order), self.momenta)
        return [(round(rate * (1 - momentum), 9), momentum) for rate, momentum in pairs]

    def _hidden(self, counts: Sequence[int]) -> float:
        """The time from when all ranks are in their last backward pass until all have ended it."""
        ends = [count * seconds for count, seconds in zip(counts, self.seconds, strict=True)]
        begins = [end - BACKWARD * seconds for end, seconds in zip(ends, self.seconds, strict=True)]
        return max(ends) - max(begins)


QUICK = Setting(exchanges=(0.1,), learning_rates=(0.1, 0.2), momenta=(0.9,), target=0.8, seeds=(0,), limit=12.0)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        seconds: Virtual time until the target; infinite if it was given up before.
        curve: Virtual time, samples and test accuracy of each evaluation.
    """

    seconds: float
    curve: tuple[tuple[float, float, float], ...]


class _Ended(Exception):
    """The run has reached its target, or will not."""


def train(
    way: Way, exchange_seconds: float, learning_rate: float, momentum: float, seed: int, setting: Setting, limit: float
) -> Run:
    """Train until the run reaches the target, or is given up: after ``limit`` virtual seconds, or far behind."""
    train_set, test_set = _halved(seed)
    torch.manual_seed(seed)
    first = Network()
    batches = _Batches(train_set, seed)
    curve: list[tuple[float, float, float]] = []
    result = math.inf

    def rank(seconds: float) -> VirtualRank:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=momentum)
        return VirtualRank(model, optimizer, lambda: batches.gradients(model), lambda: seconds)

    def evaluate() -> None:
        nonlocal result
        if training.samples < (curve[-1][1] if curve else 0.0) + EVALUATE_EVERY:
            return
        with training.ranks[0].payload.authoritative():
            curve.append((training.now, training.samples, mnist.accuracy(training.ranks[0].model, test_set)))
        last = [point[2] for point in curve[-SMOOTHED:]]
        if len(last) < SMOOTHED:
            return
        if fmean(last) >= setting.target:
            result = training.now
            raise _Ended
        if max(last) < setting.target - FAR * (limit / training.now - 1):
            raise _Ended

    left = max(exchange_seconds - way.hidden, 0.0)
    training = VirtualTraining([rank(seconds) for seconds in setting.seconds], way.exchange, way.clock, lambda _: left)
    training.ranks[0].driver.on_merge.append(evaluate)
    with suppress(_Ended):
        training.run(lambda rank: training.now < limit)
    return Run(result, tuple(curve))


def _halved(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """The example's images at half their width and height."""
    return tuple(  # type: ignore[return-value]
        TensorDataset(nn.functional.avg_pool2d(images, 2), labels)
        for images, labels in (data.tensors for data in mnist.load(seed=seed))
    )


class _Batches:
    """Micro-batches of one shuffled pass after the other, handed out in the order in which ranks ask."""

    def __init__(self, data: TensorDataset, seed: int) -> None:
        self._images, self._labels = data.tensors
        self._random = np.random.default_rng(seed)
        self._order: list[torch.Tensor] = []

    def gradients(self, model: nn.Module) -> float:
        """Leave those of the next micro-batch in a model; returns its samples."""
        if not self._order:
            passing = torch.from_numpy(self._random.permutation(len(self._labels)))
            self._order = list(passing.split(MICRO_BATCH))
        chosen = self._order.pop()
        model.zero_grad()
        nn.functional.cross_entropy(model(self._images[chosen]), self._labels[chosen]).backward()
        return float(len(chosen))


def measure(setting: Setting) -> dict[str, Any]:
    """Try all ways with all learning rates and momenta, and return the result as plain values."""
    ways, best, tried = setting.ways(), [], []
    finalists = min(FINALISTS, len(setting.tries()))
    total = len(ways) * len(setting.exchanges) * (len(setting.tries()) + finalists * (len(setting.seeds) - 1))
    with open_bar(total) as bar, _one_thread():
        for seconds in setting.exchanges:
            for name, way in ways.items():
                bar.set_description_str(f"{name}, exchange {seconds:g} s ", refresh=False)
                found = _tune(way, seconds, setting, finalists, bar)
                told = [{"way": name, "exchange": seconds, **each.to_dict()} for each in found]
                tried += told
                best.append({**told[0], "curve": found[0].shown.curve})
    return {"best": best, "tried": tried, "network": Network.__doc__, "setting": asdict(setting)}


@dataclass
class _Tried:
    """What a way does with one learning rate and momentum: a run for each seed that was tried."""

    rate: float
    momentum: float
    runs: list[Run]

    @property
    def median(self) -> float:
        return median(run.seconds for run in self.runs)

    @property
    def shown(self) -> Run:
        """The run in the middle."""
        return sorted(self.runs, key=lambda run: run.seconds)[(len(self.runs) - 1) // 2]

    def to_dict(self) -> dict[str, Any]:
        seconds = [_or_none(run.seconds) for run in self.runs]
        return {"rate": self.rate, "momentum": self.momentum, "seconds": seconds, "median": _or_none(self.median)}


def _tune(way: Way, exchange: float, setting: Setting, finalists: int, bar: tqdm[NoReturn]) -> list[_Tried]:
    """Everything that was tried with a way, best first; the first ones with all seeds."""
    first, *others = setting.seeds
    tried: list[_Tried] = []
    for rate, momentum in setting.tries():
        limit = min([setting.limit, *(HOPELESS * each.median for each in tried)])
        tried.append(_Tried(rate, momentum, [train(way, exchange, rate, momentum, first, setting, limit)]))
        bar.update(1)
    tried.sort(key=lambda each: each.median)
    for each in tried[:finalists]:
        limit = min(setting.limit, 2 * HOPELESS * tried[0].runs[0].seconds)
        for seed in others:
            if math.isfinite(each.runs[0].seconds):
                each.runs.append(train(way, exchange, each.rate, each.momentum, seed, setting, limit))
            bar.update(1)
    return sorted(tried[:finalists], key=lambda each: each.median) + tried[finalists:]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The network is so small that more than one would be slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _or_none(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def to_table(result: Mapping[str, Any]) -> Table:
    """:func:`measure` for people."""
    setting = result["setting"]
    speeds = ", ".join(f"{speed:g}" for speed in setting["speeds"])
    table = Table(
        title=f"Virtual seconds to {setting['target']:.1%} test accuracy, speeds {speeds}",
        caption=f"median of {len(setting['seeds'])} seeds, with the best learning rate and momentum of "
        f"{len(setting['learning_rates']) * len(setting['momenta'])}; a micro-batch of {MICRO_BATCH} takes "
        f"{setting['micro_batch']:g} s at speed 1",
    )
    table.add_column("")
    for seconds in setting["exchanges"]:
        table.add_column(f"exchange {seconds:g} s", justify="right")
    cells = {(each["way"], each["exchange"]): each for each in result["best"]}
    for way in dict.fromkeys(each["way"] for each in result["best"]):
        table.add_row(way, *(_cell(cells[way, seconds], setting["limit"]) for seconds in setting["exchanges"]))
    return table


def _cell(each: Mapping[str, Any], limit: float) -> str:
    if each["median"] is None:
        return f"> {limit:g}"
    return f"{each['median']:.1f} ({each['rate']:g}, {each['momentum']:g})"


def draw(result: Mapping[str, Any]) -> Figure:
    """For each exchange time the medians with a dot for each seed, above accuracy against time of the run between."""
    exchanges = result["setting"]["exchanges"]
    figure = Figure(figsize=(4.4 * len(exchanges) + 1.5, 7), layout="constrained")
    rows = figure.subplots(2, len(exchanges), squeeze=False, sharey="row")
    for column, seconds in enumerate(exchanges):
        best = [each for each in result["best"] if each["exchange"] == seconds]
        _draw_times(rows[0][column], best, result["setting"], f"Exchange {seconds:g} s")
        _draw_curves(rows[1][column], best, result["setting"])
    rows[1][0].set_ylabel("test accuracy")
    return figure


def _draw_times(axes: Axes, best: Sequence[Mapping[str, Any]], setting: Mapping[str, Any], title: str) -> None:
    names = [each["way"] for each in best]
    shown = [setting["limit"] if each["median"] is None else each["median"] for each in best]
    axes.barh(names, shown, color=[f"C{index}" for index in range(len(best))])
    for each, end in zip(best, shown, strict=True):
        reached = [seconds for seconds in each["seconds"] if seconds is not None]
        axes.plot(reached, [each["way"]] * len(reached), linestyle="", marker=".", color="black", markersize=4)
        label = f"> {setting['limit']:g}" if each["median"] is None else f"{each['median']:.1f}"
        right = (max([end, *reached]), each["way"])
        axes.annotate(label, right, (6, 0), textcoords="offset points", va="center", fontsize="small")
    axes.margins(x=0.18)
    axes.set_ylim(len(best) - 0.4, -0.6)  # the first way on top; the axis is shared
    axes.set(xlabel=f"virtual seconds to {setting['target']:.0%}", title=title)
    axes.grid(alpha=0.3, axis="x")


def _draw_curves(axes: Axes, best: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]) -> None:
    for each in best:
        points = np.array(each["curve"]).reshape(-1, 3)
        if len(points) >= SMOOTHED:
            smooth = np.convolve(points[:, 2], np.full(SMOOTHED, 1 / SMOOTHED), "valid")
            axes.plot(points[SMOOTHED - 1 :, 0], smooth, linewidth=1.2)
        else:
            axes.plot([], [])  # keeps its colour
    axes.axhline(setting["target"], color="gray", linestyle=":", linewidth=1)
    axes.set_ylim(max(setting["target"] - 0.15, 0), min(setting["target"] + 0.02, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("virtual seconds")
    axes.grid(alpha=0.3)
