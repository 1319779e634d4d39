"""Reads a cluster's TOML file; see :mod:`horovod_abs.sim.models` for what stands in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from horovod_abs.sim.models import ClusterError, ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.speeds import Bursts, Cost, Drift, Load, Noise, RankModel, Stall

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = TypeVar("Value")


def parse(text: str, *, name: str, path: Path) -> ClusterModel:
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
    micro_batch.refuse_others()
    network = _network(file.table("network"))
    kinds = file.tables("ranks")
    if not kinds:
        raise file.error("ranks", "there is no rank", "write a table [[ranks]] with count = 4")
    ranks = [rank for kind in kinds for rank in _ranks(kind, cost, samples)]
    for failure in file.tables("failures"):
        _fail(failure, ranks)
    file.refuse_others()
    return file.made(lambda: ClusterModel(name, tuple(ranks), network, samples))


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
    from horovod_abs.observe.runlog import RunLogError, read_run_log
    from horovod_abs.sim.recorded import rank_of

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
