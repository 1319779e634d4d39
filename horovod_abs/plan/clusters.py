"""Clusters by preset, or as a TOML file describes them.

    cluster = load("mixed")     # or "permanent", "transient", or the path of a TOML file

The three presets are the kinds of heterogeneity of [ABS-SGD]: GPUs that differ (``permanent``), equal ones whose load
changes (``transient``), and both (``mixed``); they lie beside this module, in ``presets``, as examples of a file::

    [micro_batch]               # what one costs at speed 1
    samples = 16
    fixed_ms = 2.0              # 0 by default
    sample_ms = 1.25
    merge_ms = 0.5              # to apply an exchange; 0 by default

    [network]                   # 0 ms, 1,000 Mbit/s, a ring with overlap by default
    latency_ms = 0.05
    mbit = [1000, 1000, 1000, 100]      # or one number for all
    algorithm = "ring"          # or "tree"
    overlap = true              # synchronous training exchanges during the backward pass

    [[ranks]]                   # as many tables as there are kinds
    count = 3                   # 1 by default
    speed = 0.5                 # 1 by default
    jitter = 0.1                # standard deviation of the logarithm of a micro-batch's time
    stragglers = { probability = 0.02, factor = 4.0, spread = 0.5 }
    bursts = { every_s = 10.0, lasting_s = 5.0, factor = 3.0 }
    drift = { factor = 1.5, over_s = 600.0 }
    trace = { log = "run.jsonl", rank = 2 }     # plays a rank of a run log over and over again

    [[failures]]
    rank = 3
    at_s = 30.0
    pause_s = 5.0               # or leaves = true: it takes part with weight 0 from then on

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from horovod_abs.observe.runlog import RunLogError, read_run_log
from horovod_abs.plan.recorded import rank_of
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.speeds import Bursts, Cost, Drift, Load, Noise, RankModel, Stall

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = ("permanent", "transient", "mixed")

Value = TypeVar("Value")


class ClusterError(ValueError):
    """A description of a cluster cannot be used: says where, what is wrong, and what to write."""


def load(cluster: str | Path) -> ClusterModel:
    """A preset, or what a TOML file describes.

    >>> [rank.speed for rank in load("mixed").ranks]
    [1.0, 1.0, 0.5, 0.25]

    Args:
        cluster: Name of a preset (:data:`PRESETS`), or the path of a file.

    Raises:
        ClusterError: there is neither, or the file is wrong; names key, value and remedy.
    """
    name = str(cluster)
    path = Path(__file__).parent / "presets" / f"{name}.toml" if name in PRESETS else Path(cluster)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)
        raise ClusterError(
            f"{name} is no cluster: pass one of {', '.join(PRESETS)}, or the path of a TOML file ({why})"
        ) from None
    return _parse(text, name=path.stem, path=path)


def _parse(text: str, *, name: str, path: Path) -> ClusterModel:
    """The cluster that a file describes.

    Args:
        text: Of the file.
        name: Of the cluster.
        path: Of the file, for messages and as the folder of run logs.

    Raises:
        ClusterError: it is no TOML, or describes no cluster.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path}: is not TOML: {error}. Look at a preset for an example") from None
    file = _Table(path, "", values)
    micro_batch = file.table("micro_batch")
    samples = micro_batch.whole("samples", 16)
    cost = micro_batch.made(
        lambda: Cost(micro_batch.number("fixed_ms", 0.0) / 1e3, micro_batch.number("sample_ms", None) / 1e3)
    )
    merge_seconds = micro_batch.number("merge_ms", 0.0) / 1e3
    micro_batch.refuse_others()
    network = _network(file.table("network"))
    kinds = file.tables("ranks")
    if not kinds:
        raise file.error("ranks", "there is no rank", "write a table [[ranks]] with count = 4")
    ranks = [rank for kind in kinds for rank in _ranks(kind, cost, samples)]
    for failure in file.tables("failures"):
        _fail(failure, ranks)
    file.refuse_others()
    return file.made(lambda: ClusterModel(name, tuple(ranks), network, samples, merge_seconds))


def _network(table: _Table) -> Network:
    mbit: float | tuple[float, ...]
    if isinstance(table.values.get("mbit"), list):
        mbit = tuple(table.numbers("mbit"))
    else:
        mbit = table.number("mbit", 1000.0, above=0.0)
    network = table.made(
        lambda: Network(
            latency=table.number("latency_ms", 0.0) / 1e3,
            mbit=mbit,
            algorithm=table.text("algorithm", "ring", ("ring", "tree")),
            overlap=table.flag("overlap", True),
        )
    )
    table.refuse_others()
    return network


def _ranks(table: _Table, cost: Cost, samples: int) -> list[RankModel]:
    count = table.whole("count", 1)
    speed = table.number("speed", 1.0, above=0.0)
    stragglers = table.table("stragglers")
    noise = stragglers.made(
        lambda: Noise(
            table.number("jitter", 0.0),
            stragglers.number("probability", 0.0),
            stragglers.number("factor", 4.0, above=0.0),
            stragglers.number("spread", 0.5),
        )
    )
    stragglers.refuse_others()
    loads: list[Load] = []
    if table.has("bursts"):
        bursts = table.table("bursts")
        numbers = [bursts.number(key, None, above=0.0) for key in ("every_s", "lasting_s", "factor")]
        bursts.refuse_others()
        loads.append(Bursts(*numbers))
    if table.has("drift"):
        drift = table.table("drift")
        numbers = [drift.number(key, None, above=0.0) for key in ("factor", "over_s")]
        drift.refuse_others()
        loads.append(Drift(*numbers))
    model = RankModel(cost, speed, noise, tuple(loads))
    if table.has("trace"):
        model = _traced(table.table("trace"), model, samples)
    table.refuse_others()
    return [model] * count


def _traced(table: _Table, model: RankModel, samples: int) -> RankModel:
    """The model with the trace of a recorded rank, whose mean time its own mean time becomes."""
    log, rank = table.text("log", None), table.whole("rank", 0, least=0)
    table.refuse_others()
    try:
        recorded = rank_of(read_run_log(table.path.parent / log), rank)
    except (OSError, RunLogError) as error:
        raise table.error("log", str(error), "name a file that DistributedOptimizer(record=…) has written") from None
    ratio = recorded.mean_seconds(samples) / model.cost.seconds(samples)
    return replace(
        model,
        cost=Cost(model.cost.fixed * ratio, model.cost.per_sample * ratio),
        loads=(*model.loads, *recorded.loads),
    )


def _fail(table: _Table, ranks: list[RankModel]) -> None:
    rank, at = table.whole("rank", None, least=0), table.number("at_s", None)
    if rank >= len(ranks):
        raise table.error("rank", f"there is no rank {rank}", f"write one from 0 to {len(ranks) - 1}")
    if (table.has("pause_s")) == (table.has("leaves")):
        raise table.error("pause_s", "a failure needs one of them", "write pause_s = 5.0, or leaves = true")
    if table.flag("leaves", False):
        ranks[rank] = replace(ranks[rank], leaves=at)
    else:
        stall = Stall(at, table.number("pause_s", None, above=0.0))
        ranks[rank] = replace(ranks[rank], stalls=(*ranks[rank].stalls, stall))
    table.refuse_others()


class _Table:
    """A table of the file: hands out its values, and says where a wrong one stands."""

    def __init__(self, path: Path, name: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self._name = name
        self._known: set[str] = set()

    def error(self, key: str, what: str, remedy: str) -> ClusterError:
        """About one of its keys."""
        return ClusterError(f"{self.path}: {self._name}{key}: {what}. Remedy: {remedy}")

    def has(self, key: str) -> bool:
        """Whether there is a value for it."""
        self._known.add(key)
        return key in self.values

    def table(self, key: str) -> _Table:
        """A table in it; empty if there is none."""
        self._known.add(key)
        values = self.values.get(key, {})
        if not isinstance(values, dict):
            raise self.error(key, f"{values!r} is not a table", f"write [{key}] and its keys below it")
        return _Table(self.path, f"{self._name}{key}.", values)

    def tables(self, key: str) -> list[_Table]:
        """The tables of an array of them."""
        self._known.add(key)
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            raise self.error(key, f"{values!r} is not a list of tables", f"write [[{key}]] with two brackets")
        return [_Table(self.path, f"{key}[{number}].", each) for number, each in enumerate(values)]

    def number(self, key: str, default: float | None, *, above: float | None = None) -> float:
        """A number of at least 0, or above another."""
        value = self._value(key, default, "5.0")
        least = "at least 0" if above is None else f"above {above:g}"
        fits = _is_number(value) and math.isfinite(value) and (value >= 0 if above is None else value > above)
        if not fits:
            raise self.error(key, f"{value!r} is not a number of {least}", f"write a number of {least}")
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """Positive numbers."""
        values = self._value(key, None, "[1.0, 2.0]")
        if not all(_is_number(value) and 0 < value < math.inf for value in values):
            raise self.error(key, f"{values!r} are not all positive numbers", "write one for each rank")
        return [float(value) for value in values]

    def whole(self, key: str, default: int | None, *, least: int = 1) -> int:
        """A whole number."""
        value = self._value(key, default, str(least))
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"{value!r} is not a whole number of at least {least}", f"write {least} or more")
        return value

    def text(self, key: str, default: str | None, choices: tuple[str, ...] = ()) -> Any:
        """A text, by default any."""
        value = self._value(key, default, '"…"')
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = " or ".join(f'"{choice}"' for choice in choices) or "a text in quotes"
            raise self.error(key, f"{value!r} is not {wanted}", f"write {wanted}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default, "true")
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false", "write true or false, without quotes")
        return value

    def refuse_others(self) -> None:
        """Refuse what nobody has asked for."""
        for key in self.values:
            if key not in self._known:
                known = ", ".join(sorted(self._known))
                raise self.error(key, "there is no such key", f"use one of {known}, or remove it")

    def made(self, make: Callable[[], Value]) -> Value:
        """Make something of the values that together may be wrong."""
        try:
            return make()
        except ClusterError:
            raise
        except ValueError as error:
            raise ClusterError(f"{self.path}: {self._name.rstrip('.') or 'the cluster'}: {error}") from None

    def _value(self, key: str, default: Any, example: str) -> Any:
        self._known.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise self.error(key, "it is missing", f"write {key} = {example}")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
