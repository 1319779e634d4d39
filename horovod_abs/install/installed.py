"""What a Horovod that is already there can do, and whether it fits this environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from horovod_abs.install.source import EDITS
from horovod_abs.install.target import STAMP, Target

_PROBE = """
import json, pathlib
library = error = ""
try:
    import mpi4py.MPI as mpi
    library = mpi.Get_library_version().split(",")[0]
except Exception as exception:
    error = f"{type(exception).__name__}: {exception}"
import horovod.FRAMEWORK as hvd
maps = pathlib.Path("/proc/self/maps")
mapped = maps.read_text().splitlines() if maps.exists() else []
print("\\n" + json.dumps({
    "mpi": bool(hvd.mpi_built()),
    "gloo": bool(hvd.gloo_built()),
    "nccl": bool(hvd.nccl_built()),
    "mpi4py": library,
    "mpi4py_error": error,
    "mpi_libraries": sorted({line.split()[-1] for line in mapped if "/libmpi.so" in line}),
}))
"""


@dataclass(frozen=True)
class Abilities:
    """What ``horovod.torch`` or ``horovod.tensorflow`` reports in a process of its own.

    Attributes:
        mpi, gloo, nccl: whether Horovod was built with it.
        mpi4py: the MPI library that mpi4py runs on, as that library calls itself.
        mpi4py_error: why mpi4py does not start.
        mpi_libraries: the MPI libraries in the process once both are loaded; one, if all is well.
        error: why the import failed; the rest is then empty.
    """

    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    mpi4py: str = ""
    mpi4py_error: str = ""
    mpi_libraries: tuple[str, ...] = ()
    error: str = ""


def probe(framework: str) -> Abilities:
    """Import Horovod for one framework in a fresh process and ask what it was built with."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE.replace("FRAMEWORK", framework)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return Abilities(error=f"importing horovod.{framework} did not end within 120 s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Abilities(error=lines[-1] if lines else f"exit status {done.returncode}")
    report = json.loads(done.stdout.splitlines()[-1])
    return Abilities(**{**report, "mpi_libraries": tuple(report["mpi_libraries"])})


def version() -> str:
    """The installed Horovod's version, or ""."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def root() -> Path:
    """The folder that holds the installed package ``horovod``."""
    return Path(str(importlib.metadata.distribution("horovod").locate_file("")))


def target() -> Target | None:
    """What the installed Horovod was built against; None if it is not one of our builds."""
    if not version():
        return None
    stamp = root() / "horovod" / STAMP
    return Target.from_module(stamp.read_text(encoding="utf-8")) if stamp.is_file() else None


def why_not(wanted: Target) -> str:
    """Why the installed Horovod does not do for this environment, or "" if it does.

    One that somebody else built is accepted if it works with MPI and Gloo for every framework
    installed, and if its launcher works with current versions of Python and Open MPI.
    """
    if not version():
        return "Horovod is not installed"
    built = target()
    if built and (differences := wanted.differences(built)):
        return "; ".join(differences)
    if not built and (lacking := [edit.reason for edit in EDITS if not edit.is_in(root())]):
        return f"it was built without an edit that it needs: {lacking[0]}"
    for framework in wanted.frameworks:
        abilities = probe(framework)
        if abilities.error:
            return f"horovod.{framework} cannot be imported: {abilities.error}"
        if not (abilities.mpi and abilities.gloo):
            return f"horovod.{framework} was built without {'Gloo' if abilities.mpi else 'MPI'}"
    return ""
