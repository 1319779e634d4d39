"""``horovod-abs bench``: the words of the benchmarks' commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from horovod_abs import options
from horovod_abs.bench.launch import LaunchError

Value = TypeVar("Value")

app = typer.Typer(help="Measure what the package promises.", no_args_is_help=True)


class Controller(str, Enum):
    """Horovod's controllers."""

    mpi = "mpi"
    gloo = "gloo"


class Framework(str, Enum):
    """The frameworks that can be measured."""

    torch = "torch"


def _checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    def checked(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return checked


def _count(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number >= 1 and number.is_integer()):
        raise ValueError(f"{text!r} is not a whole number of at least 1, such as 1000000 or 1e6")
    return int(number)


def _clock(text: str) -> str:
    options.clock(text)
    return text


def _exchange(text: str) -> str:
    options.exchange(text)
    return text


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)]


@app.command()
def utilisation(
    micro_batch_ms: Annotated[
        Any,
        typer.Option(
            parser=_checked(options.positive_numbers),
            metavar="MS,MS,…",
            help="Emulated time of a micro-batch of 16 on each rank, forward and backward.",
        ),
    ] = "20,20,40,80",
    parameters: Annotated[
        Any, typer.Option(parser=_checked(_count), metavar="N", help="Parameters of the model, e.g. 1e6.")
    ] = "1e6",
    clock: Annotated[
        Any,
        typer.Option(
            parser=_checked(_clock), metavar="CLOCK", help="When a round ends: sync, count:N, interval:S, target:N."
        ),
    ] = "sync",
    exchange: Annotated[
        Any,
        typer.Option(
            parser=_checked(_exchange),
            metavar="EXCHANGE",
            help="What is averaged: gradients, lookahead, taylor, waiting, updates, updates:T.",
        ),
    ] = "gradients",
    controller: Annotated[Controller, typer.Option(help="Horovod's.")] = Controller.mpi,
    framework: Annotated[Framework, typer.Option(help="What computes.")] = Framework.torch,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each; the median counts.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One short measurement of each, in under 40 s.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Share of the ranks' solo speeds that synchronous Horovod and ABS-SGD reach, on ranks that this starts itself."""
    from horovod_abs.bench import utilisation as bench

    lengths = {"repeats": 1, "rounds": 120, "synchronous_rounds": 40} if quick else {"repeats": repeats}
    setting = bench.Setting(micro_batch_ms, parameters, clock, exchange, **lengths)
    try:
        result = bench.measure(setting, controller.value)
    except LaunchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 4 micro-batches on each side.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time and memory that `step` costs on one rank, against PyTorch's own gradient accumulation."""
    from horovod_abs.bench import overhead as bench

    result = bench.measure(2 if quick else rounds)
    Console().print(bench.to_table(result))
    _write(result, json_file)


def _write(result: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
