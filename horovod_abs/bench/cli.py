"""``horovod-abs bench``: the words of the benchmarks' commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from horovod_abs import options
from horovod_abs.bench.hosts import HostsUnavailable
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
    tensorflow = "tensorflow"


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


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _hosts(text: str) -> tuple[int, ...]:
    return () if text == "none" else _whole_numbers(text)


def _speeds(text: str) -> tuple[float, ...]:
    return () if text == "none" else options.positive_numbers(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


ReportFile = Annotated[
    Path | None, typer.Option(help="Write the tables into their section of this Markdown file.", dir_okay=False)
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the result to this PNG.", dir_okay=False)]


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
    result = _measured(lambda: bench.measure(setting, controller.value, framework.value))
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def prediction(
    recorded_ms: Annotated[
        Any,
        typer.Option(
            parser=_checked(options.positive_numbers),
            metavar="MS,MS,MS,MS",
            help="Emulated time of a micro-batch on each of 4 ranks while the synchronous run is recorded.",
        ),
    ] = "20,20,40,80",
    controller: Annotated[Controller, typer.Option(help="Horovod's.")] = Controller.mpi,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each; the median counts.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="One cluster, short, in under 40 s.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Whether `simulate --from-log` of a synchronous run predicts other algorithms at other speeds; starts 4 ranks."""
    from horovod_abs.bench import prediction as bench

    try:
        setting = bench.Setting(recorded_ms, repeats=repeats)
        if quick:
            shown = "one slow"
            setting = replace(setting, clusters={shown: setting.clusters[shown]}, steps=60, rounds=80)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = _measured(lambda: bench.measure(setting, controller.value))
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 4 micro-batches on each side.")] = 8,
    exchange: Annotated[
        str, typer.Option(parser=_checked(_exchange), metavar="E", help="As in bench utilisation.")
    ] = "gradients",
    framework: Annotated[Framework, typer.Option(help="TensorFlow: time of model.fit.")] = Framework.torch,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time and memory that `step` costs on one rank, against PyTorch's own gradient accumulation (or plain Keras)."""
    if framework is Framework.tensorflow:
        from horovod_abs.bench import overhead_keras

        if exchange != "gradients":
            raise typer.BadParameter("--exchange is for --framework torch")
        result = overhead_keras.measure(4 * (2 if quick else rounds))
        Console().print(overhead_keras.to_table(result))
        _write(result, json_file)
        return
    from horovod_abs.bench import overhead as bench

    result = bench.measure(2 if quick else rounds, exchange)
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def discrepancy(
    workers: Annotated[
        Any, typer.Option(parser=_checked(_whole_numbers), metavar="N,N,…", help="Numbers of workers, 2 to 32.")
    ] = "2,4,8,16,32",
    staleness: Annotated[
        Any, typer.Option(parser=_checked(_whole_numbers), metavar="T,T,…", help="Values of the staleness τ.")
    ] = "1,2,4,8,16,32",
    seed: Annotated[int, typer.Option(help="Of model, images and micro-batches.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few of each and fewer steps, in under 20 s.")] = False,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """How far workers' models are from each other: averaging model updates against delaying gradients."""
    from horovod_abs.bench import discrepancy as bench

    try:
        setting = replace(bench.QUICK, seed=seed) if quick else bench.Setting(workers, staleness, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = bench.measure(setting)
    Console().print(bench.to_table(result))
    _write(result, json_file)
    _save(lambda: bench.draw(result), plot)


@app.command()
def idle(
    micro_batches: Annotated[
        Any,
        typer.Option(
            parser=_checked(options.positive_numbers), metavar="S,S,…", help="Seconds of a micro-batch of each worker."
        ),
    ] = "1,1,1,1",
    exchange: Annotated[float, typer.Option(help="Seconds of an exchange.")] = 3.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of the logarithm of both.")] = 0.1,
    staleness: Annotated[
        Any, typer.Option(parser=_checked(_whole_numbers), metavar="T,T,…", help="Values of the staleness τ.")
    ] = "1,2,3,4,6,8,12,16,24,32",
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter runs.")] = False,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """How much workers wait against the staleness that they may reach, in virtual time with the production engine."""
    from horovod_abs.bench import idle as bench

    seconds = (bench.QUICK if quick else bench.Setting()).seconds
    try:
        setting = bench.Setting(micro_batches, exchange, jitter, staleness, seconds, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = bench.measure(setting)
    Console().print(bench.to_table(result))
    _write(result, json_file)
    _save(lambda: bench.draw(result), plot)


@app.command()
def target(
    samples: Annotated[float, typer.Option(help="The target.")] = 320.0,
    micro_batches: Annotated[
        Any,
        typer.Option(
            parser=_checked(options.positive_numbers), metavar="S,S,…", help="Seconds of a micro-batch of each rank."
        ),
    ] = "0.02,0.02,0.04,0.08",
    slower: Annotated[int, typer.Option(help="The rank that becomes half as fast.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds before it does, and as many after.")] = 200,
    local_time: Annotated[bool, typer.Option("--local-time", help="Each rank keeps the time, as with Gloo.")] = False,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """How well TargetBatchClock holds the global batch, in virtual time with the production engine."""
    from horovod_abs.bench import target as bench

    tick = None if local_time else 0.001
    try:
        setting = bench.Setting(samples, micro_batches, slower, rounds, tick=tick, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = bench.measure(setting)
    Console().print(bench.to_table(result))
    _write(result, json_file)
    _save(lambda: bench.draw(result), plot)


@app.command()
def convergence(
    cluster: Annotated[
        list[str], typer.Option(help="permanent, transient, mixed, or a TOML file; more than one if given again.")
    ] = ["permanent", "transient", "mixed"],  # noqa: B006  (typer copies it)
    task: Annotated[str, typer.Option(help="What is trained: mnist, or fashion (Fashion-MNIST, on Debian).")] = "mnist",
    algorithms: Annotated[
        Any, typer.Option(parser=_checked(_names), metavar="A,A,…", help="Which; all by default.")
    ] = "all",
    exchanges: Annotated[
        Any, typer.Option(parser=_checked(_names), metavar="E,E,…", help="short, medium, long.")
    ] = "short,medium,long",
    target_accuracy: Annotated[float | None, typer.Option(help="To reach; the task's own by default.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="To tune each algorithm with, on each cluster.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="So many are reported; the median counts.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    folder: Annotated[
        Path, typer.Option(help="Of runs that are done: what is in it is not done again.", file_okay=False)
    ] = Path("runs/convergence"),
    quick: Annotated[bool, typer.Option("--quick", help="To 80 % by four algorithms, in under a minute.")] = False,
    report: ReportFile = None,
    section: Annotated[str | None, typer.Option(help="Of that file; by default the task's name.")] = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Virtual time that ways of training really take to an accuracy, ours and the papers'; goes on where it stopped."""
    from horovod_abs.bench import convergence as bench
    from horovod_abs.bench import verdict
    from horovod_abs.plan.clusters import load

    chosen = bench.ALL if algorithms == ("all",) else algorithms
    try:
        clusters = tuple(load(name) for name in cluster)
        setting = bench.Setting(clusters, task, chosen, exchanges, target_accuracy, trials, seeds)
        setting.chosen.data()
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    setting = bench.quick(setting) if quick else setting
    console = Console()
    console.print(
        f"{setting.runs} runs, those in {folder} included. Stop when you like: the next time goes on from there."
    )
    result = bench.measure(setting, folder, jobs=jobs)
    for table in verdict.to_tables(result):
        console.print(table)
    if report is not None:
        verdict.write_report(report, section or task, verdict.to_markdown(result))
    _write(result, json_file)
    _save(lambda: verdict.draw(result), plot)


@app.command()
def scale(
    cluster: Annotated[str, typer.Option(help="permanent, transient, mixed, or a TOML file.")] = "mixed",
    workers: Annotated[
        Any, typer.Option(parser=_checked(_whole_numbers), metavar="N,N,…", help="Numbers of them.")
    ] = "4,16,64,256,1024",
    gbit: Annotated[
        Any, typer.Option(parser=_checked(options.positive_numbers), metavar="G,G,…", help="Of each link, a second.")
    ] = "1,10,100",
    algorithms: Annotated[
        Any, typer.Option(parser=_checked(_names), metavar="A,A,…", help="Which; all by default.")
    ] = "all",
    model_mb: Annotated[float, typer.Option(help="Megabytes of the gradient.")] = 44.0,
    seconds: Annotated[float, typer.Option(help="Virtual time of each.")] = 60.0,
    report: ReportFile = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Up to how many workers each algorithm pays, by network, in virtual time; 2 minutes."""
    from horovod_abs.bench import scale as bench
    from horovod_abs.bench import verdict
    from horovod_abs.plan.clusters import load
    from horovod_abs.sim.simulate import ALGORITHMS

    chosen = tuple(ALGORITHMS) if algorithms == ("all",) else algorithms
    try:
        setting = bench.Setting(load(cluster), workers, gbit, chosen, model_mb, seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = bench.measure(setting)
    for table in bench.to_tables(result):
        Console().print(table)
    if report is not None:
        verdict.write_report(report, "scale", bench.to_markdown(result))
    _write(result, json_file)
    _save(lambda: bench.draw(result), plot)


@app.command()
def network(
    hosts: Annotated[int, typer.Option(help="How many hosts of this machine to make; as root.")] = 4,
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of each host's link: 1gbit, 100mbit.")] = "1gbit",
    parameters: Annotated[
        Any, typer.Option(parser=_checked(_count), metavar="N", help="Numbers to exchange, e.g. 11e6.")
    ] = "11e6",
    ways: Annotated[
        Any, typer.Option(parser=_checked(_names), metavar="W,W,…", help="Which; all by default.")
    ] = "mpi-default,mpi-ring,mpi-segments,mpi-unfused,gloo",
    repeats: Annotated[int, typer.Option(help="Exchanges of each kind; the median counts.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small ones over MPI's ring and Gloo.")] = False,
    json_file: JsonFile = None,
) -> None:
    """How long an exchange takes over a slow network, against its limit, over MPI and Gloo and with what settings."""
    from horovod_abs.bench import network as bench

    try:
        setting = bench.QUICK if quick else bench.Setting(hosts, rate, parameters, repeats, ways)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = _measured(lambda: bench.measure(setting))
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def scaling(
    hosts: Annotated[
        Any,
        typer.Option(parser=_checked(_hosts), metavar="N,N,…", help="Numbers of equal hosts, or none; as root."),
    ] = "1,2,3,4",
    mixed: Annotated[
        Any,
        typer.Option(parser=_checked(_speeds), metavar="S,S,…", help="Speeds of a mixed cluster's hosts, or none."),
    ] = "1,1,0.5,0.25",
    micro_batch_ms: Annotated[float, typer.Option(help="Emulated time of a micro-batch of 16 at speed 1.")] = 100.0,
    parameters: Annotated[
        Any, typer.Option(parser=_checked(_count), metavar="N", help="Parameters of the model, e.g. 11e6.")
    ] = "11e6",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of each host's link: 1gbit, 100mbit.")] = "1gbit",
    rounds: Annotated[int, typer.Option(help="In a measurement.")] = 30,
    controller: Annotated[Controller, typer.Option(help="Horovod's.")] = Controller.mpi,
    json_file: JsonFile = None,
) -> None:
    """Share of their solo speeds that 1 to 4 hosts on a slow network reach, in five ways of training; 15 minutes."""
    from horovod_abs.bench import scaling as bench

    try:
        setting = bench.Setting(hosts, mixed, micro_batch_ms, parameters, rate, rounds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = _measured(lambda: bench.measure(setting, controller.value))
    Console().print(bench.to_table(result))
    _write(result, json_file)


@app.command()
def accuracy(
    speeds: Annotated[
        Any, typer.Option(parser=_checked(options.positive_numbers), metavar="S,S,…", help="Of the hosts' devices.")
    ] = "1,1,0.5,0.25",
    micro_batch_ms: Annotated[float, typer.Option(help="Emulated time of a micro-batch of 16 at speed 1.")] = 100.0,
    padding: Annotated[
        Any, typer.Option(parser=_checked(_count), metavar="N", help="Idle parameters to exchange, e.g. 11e6.")
    ] = "11e6",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of each host's link: 1gbit, 100mbit.")] = "1gbit",
    ways: Annotated[
        Any, typer.Option(parser=_checked(_names), metavar="W,W,…", help="Of ssgd, lookahead, updates.")
    ] = "ssgd,lookahead,updates",
    seed: Annotated[int, typer.Option(help="Of model and data.")] = 0,
    controller: Annotated[Controller, typer.Option(help="Horovod's.")] = Controller.mpi,
    json_file: JsonFile = None,
) -> None:
    """Training time to 95 % on MNIST over hosts on a slow network, with the exchange of a large model; 10 minutes."""
    from horovod_abs.bench import accuracy as bench

    try:
        setting = bench.Setting(speeds, micro_batch_ms, padding, rate, ways, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    result = _measured(lambda: bench.measure(setting, controller.value))
    Console().print(bench.to_table(result))
    _write(result, json_file)


def _measured(measure: Callable[[], Value]) -> Value:
    """Ends the command with what is wrong if hosts or ranks cannot be started."""
    try:
        return measure()
    except (LaunchError, HostsUnavailable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _save(draw: Callable[[], Any], path: Path | None) -> None:
    if path is not None:
        from horovod_abs.observe import plots

        plots.save(draw(), path)


def _write(result: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
