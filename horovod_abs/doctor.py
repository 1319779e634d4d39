"""``horovod-abs doctor``: what works here, what does not, and how to repair it.

Each check looks at one thing that users have trouble with and answers with a `Check`. The last two
are not inspections but runs: two ranks, started by ``horovodrun`` as a user would, add their ranks
up. Every child process has a time limit and is ended with all that it started, so that the doctor
itself never hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from horovod_abs.install import installed, requirements
from horovod_abs.install.problems import SetupError
from horovod_abs.install.target import (
    FRAMEWORKS,
    Target,
    compiler,
    compiler_version,
    framework_versions,
    mpi_version,
    scripts_dir,
)

Status = Literal["ok", "warning", "failure"]
Controller = Literal["mpi", "gloo"]

INSTALL_HOROVOD = "horovod-abs install-horovod"
LAUNCH_SECONDS = 120.0
"""How long two ranks may take to start, add up and end; usually they take under ten seconds."""

_MARKS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "failure": "[bold red]failure[/]",
}
_ALLREDUCE = """
import mpi4py.MPI if {mpi} else None
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: what was looked at.
        status: "failure" if a run cannot work like this, "warning" if only something optional is missing.
        detail: what was found.
        remedy: what to do about it; empty if all is well.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(timeout: float = LAUNCH_SECONDS) -> Iterator[Check]:
    """Make all checks, one after the other, so that the caller can show each as it comes.

    Args:
        timeout: seconds that each of the two real runs may take.
    """
    yield check_compiler()
    mpirun = check_mpirun()
    yield mpirun
    try:
        versions = framework_versions()
    except SetupError as error:
        yield from (Check("Frameworks", "failure", p.what, p.remedy) for p in error.problems)
        return
    yield from check_frameworks(versions)
    present = [name for name in FRAMEWORKS if versions[name]]
    if not present:
        return
    works = True
    for framework in present:
        abilities = installed.probe(framework)
        for check in (check_horovod(framework, abilities), check_mpi4py(framework, abilities)):
            works &= check.status != "failure"
            yield check
    if not works:
        return  # two ranks would only fail for the same reason, at greater length
    yield check_freshness()
    for controller, title in (("mpi", "MPI"), ("gloo", "Gloo")):
        yield check_allreduce(present[0], controller, title, timeout)


def report(checks: Iterator[Check], *, as_json: bool = False) -> int:
    """Print the checks as a table, or as JSON; returns the exit status."""
    console = Console()
    if as_json:
        done = list(checks)
        print(json.dumps([asdict(check) for check in done], indent=2))
        return exit_status(done)
    done = []
    with console.status("Looking") as status:
        for check in checks:
            done.append(check)
            status.update(f"{check.name}: {check.status}; next")
    table = Table("", "", "found")
