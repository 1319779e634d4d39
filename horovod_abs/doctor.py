"""``horovod-abs doctor``: what works here, what does not, and how to repair it.

Each check looks at one thing that users have trouble with, and answers with a `Check`. The last two
are not inspections but runs: two ranks, started by ``horovodrun`` as a user would, add up a tensor.
Every process has a time limit and is ended with all that it started, so the doctor never hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_abs.install import installed, requirements
from horovod_abs.install.problems import SetupError
from horovod_abs.install.target import (
    FRAMEWORKS,
    Target,
    compiler_version,
    first_line,
    framework_versions,
    scripts_dir,
)

Status = Literal["ok", "warning", "failure"]
Controller = Literal["mpi", "gloo"]

LAUNCH_SECONDS = 120.0
"""How long two ranks may take to start, add up and end; they need about five seconds."""

INSTALL_HOROVOD = "horovod-abs install-horovod"
_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mpi": "MPI", "gloo": "Gloo"}
_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow-cpu"}
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: what was looked at.
        status: "failure" if a run needs it, "warning" if it is optional.
        detail: what was found.
        remedy: what to do about it; empty if all is well.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(timeout: float = LAUNCH_SECONDS) -> Iterator[Check]:
    """Make all checks, one by one, so that each can be shown as it comes.

    Args:
        timeout: seconds that each of the two real runs may take.
    """
    yield check_compiler()
    yield check_mpirun()
    versions: dict[str, str] = {}
    for name in FRAMEWORKS:
        check, versions[name] = check_framework(name)
        yield check
    present = [name for name in FRAMEWORKS if versions[name]]
    if not present:
        yield Check(
            "Frameworks",
            "failure",
            "neither PyTorch nor TensorFlow works",
            "pip install torch or pip install tensorflow-cpu",
        )
        return
    sound = True
    for name in present:
        for check in check_horovod(name, installed.probe(name)):
            sound = sound and check.status != "failure"
            yield check
    if sound:  # or else two ranks would fail for the same reason, at greater length
        yield check_build(versions)
        yield check_allreduce(present[0], "mpi", timeout)
        yield check_allreduce(present[0], "gloo", timeout)


def report(checks: Iterable[Check], *, as_json: bool = False) -> int:
    """Print the checks, as a table or as JSON; returns the exit status, 1 after a failure."""
    console = Console()
    done = []
    with Console(stderr=True).status("Examining this environment") as status:
        for check in checks:
            done.append(check)
            status.update(f"{check.name}: {check.status} …")
    healthy = all(check.status != "failure" for check in done)
    if as_json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(c) for c in done]}, indent=2))
    else:
        console.print(_table(done))
    return 0 if healthy else 1


def _table(checks: Iterable[Check]) -> Table:
    table = Table("Check", "Status", "Found, and what to do")
    for check in checks:
        found = Text(check.detail, overflow="fold")
        if check.remedy:
            found.append(f"\n→ {check.remedy}", style="bold")
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), found)
    return table


def check_compiler() -> Check:
    """A C++ compiler builds Horovod; afterwards nothing needs it."""
    if version := compiler_version():
        return Check("C++ compiler", "ok", version)
    return Check(
        "C++ compiler",
        "warning" if installed.version() else "failure",
        "none found (CXX, c++, g++, clang++)",
        requirements.GET_COMPILER,
    )


def check_mpirun() -> Check:
    """The mpirun that horovodrun is going to call: the environment's own, else the PATH's."""
    own = scripts_dir() / "mpirun"
    path = str(own) if own.exists() else shutil.which("mpirun")
    version = first_line([path, "--version"]) if path else ""
    if path and version:
        return Check("MPI launcher", "ok", f"{version}, {path}")
    return Check(
        "MPI launcher",
        "failure",
        f"{path} does not run" if path else "there is no mpirun",
        f"{INSTALL_HOROVOD} brings one along. For a system MPI instead: {requirements.GET_MPI}",
    )


def check_framework(name: str) -> tuple[Check, str]:
    """Whether a framework can be imported, and its version ("" if not)."""
    title = _TITLES[name]
    try:
        version = framework_versions([name])[name]
    except SetupError as error:
        problem = error.problems[0]
        return Check(title, "failure", problem.what, problem.remedy), ""
    if version:
        return Check(title, "ok", version.split()[0]), version
    return Check(title, "warning", "not installed", f"pip install {_PACKAGES[name]}, then {INSTALL_HOROVOD}"), ""


def check_horovod(framework: str, abilities: installed.Abilities) -> Iterator[Check]:
    """Whether Horovod works with a framework, over which controllers, on mpi4py's MPI library."""
    name = f"Horovod for {_TITLES[framework]}"
    if not installed.version():
        yield Check(name, "failure", "Horovod is not installed", INSTALL_HOROVOD)
        return
    if abilities.error:
        yield Check(name, "failure", abilities.error, f"{INSTALL_HOROVOD} --force")
        return
    controllers = {"MPI": abilities.mpi, "Gloo": abilities.gloo, "NCCL": abilities.nccl}
    built = ", ".join(controller for controller, there in controllers.items() if there)
    detail = f"{installed.version()} with {built or 'no controller'}"
    if abilities.mpi and abilities.gloo:
        yield Check(name, "ok", detail)
    else:
        yield Check(name, "failure", f"{detail}; MPI and Gloo are needed", f"{INSTALL_HOROVOD} --force")
    yield _check_mpi4py(f"mpi4py and {name}", abilities)


def _check_mpi4py(name: str, abilities: installed.Abilities) -> Check:
    libraries = abilities.mpi_libraries
    if abilities.mpi4py_error:
        return Check(
            name,
            "failure",
            f"mpi4py does not start: {abilities.mpi4py_error}",
            f"pip install --force-reinstall mpi4py, then {INSTALL_HOROVOD}",
        )
    if len(libraries) > 1:
        return Check(
            name,
            "failure",
            f"they use different MPI libraries: {', '.join(libraries)}",
            f"Remove one of the two, then {INSTALL_HOROVOD} --force",
        )
    where = libraries[0] if libraries else "library file unknown on this system"
    return Check(name, "ok", f"the same {abilities.mpi4py}, {where}")


def check_build(versions: Mapping[str, str]) -> Check:
    """Whether Horovod was built for what is installed now."""
    name = "Horovod's build"
    built = installed.target()
    if built is None:
        return Check(
            name,
            "warning",
            "Horovod was not built by horovod-abs; it may lack edits that current systems need",
            f"If anything below fails: {INSTALL_HOROVOD} --force",
        )
    now = Target.detect(built.mpi_kind, built.gpu, {}, versions)
    if differences := now.differences(built):
        return Check(name, "warning", "; ".join(differences), INSTALL_HOROVOD)
    return Check(name, "ok", "fits everything that is installed")


def check_allreduce(framework: str, controller: Controller, timeout: float) -> Check:
    """Two real ranks, started by horovodrun, allreduce a tensor."""
    name = f"Two ranks over {_TITLES[controller]}"
    command = [str(scripts_dir() / "horovodrun"), "-np", "2", f"--{controller}", sys.executable]
    command += ["-m", "horovod_abs.install.two_ranks", framework, controller]
    status, output = run_bounded(command, timeout)
    if status == 0 and output.count("ranks=2 sum=3.0") == 2:
        return Check(name, "ok", f"allreduce through {_TITLES[framework]} is right")
    if status is None:
        return Check(
            name,
            "failure",
            f"did not end within {timeout:g} s",
            "Something keeps the processes of this machine from reaching each other: look at the firewall, "
            "and whether `hostname` resolves",
        )
    last = "\n".join(output.strip().splitlines()[-6:])
    return Check(
        name,
        "failure",
        f"exit status {status}:\n{last}",
        f"See the whole output: {' '.join(command)}. If Horovod itself is broken: {INSTALL_HOROVOD} --force",
    )


def run_bounded(command: list[str], timeout: float) -> tuple[int | None, str]:
    """Run a command, and end it with all that it started once the time is up.

    Returns:
        Its exit status (None if the time was up) and its output, standard error included.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would be held open by orphans
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_quiet_environment()
            )
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror}"
        status: int | None
        try:
            status = process.wait(timeout)
        except BaseException as error:
            _end_tree(process.pid)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        output.seek(0)
        return status, output.read()


def _end_tree(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            _, tree = psutil.wait_procs(tree, timeout=5)


def _quiet_environment() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_MCA_mpi_yield_when_idle": "1"}
