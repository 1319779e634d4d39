"""The design's borders: ``core`` does no I/O and knows nobody, ``sim`` knows only ``core``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod_abs.core
import horovod_abs.sim

IMPURE = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "signal", "subprocess", "threading"),
    *("http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"),
    *("fileinput", "glob", "io", "logging", "os", "pathlib", "shutil", "sqlite3", "tempfile"),
    *("ctypes", "datetime", "importlib", "platform", "secrets", "sys", "time"),
}
"""Modules of the standard library that do I/O, tell the time, or depend on the machine."""

IMPURE_BUILTINS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}


def imports(source: str, package: str) -> Iterator[str]:
    """The full names of all modules that a module of ``package`` imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            if module == "horovod_abs" or (node.level and not node.module):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def foreign(source: str, package: str, *, allowed: tuple[str, ...]) -> set[str]:
    """What a module of ``package`` uses and may not."""
    used = set(imports(source, package)) - {"horovod_abs"}
    standard = {name for name in used if name.split(".")[0] in sys.stdlib_module_names}
    ours = {name for name in used if any(name == root or name.startswith(f"{root}.") for root in allowed)}
    impure = {name for name in standard if name.split(".")[0] in IMPURE}
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS
    }
    return (used - standard - ours) | impure | calls


def sources(package: str, path: list[str]) -> list[tuple[str, Path]]:
    return [
        (".".join([package, *file.relative_to(root).parent.parts]), file)
        for root in map(Path, path)
        for file in sorted(root.rglob("*.py"))
    ]


CORE = sources("horovod_abs.core", list(horovod_abs.core.__path__))
SIM = sources("horovod_abs.sim", list(horovod_abs.sim.__path__))


@pytest.mark.parametrize(("package", "file"), CORE, ids=[file.stem for _, file in CORE])
def test_core_is_pure(package: str, file: Path) -> None:
    assert foreign(file.read_text(), package, allowed=("numpy", "horovod_abs.core")) == set()


@pytest.mark.parametrize(("package", "file"), SIM, ids=[file.stem for _, file in SIM])
def test_sim_knows_no_framework_and_no_mpi(package: str, file: Path) -> None:
    assert foreign(file.read_text(), package, allowed=("numpy", "horovod_abs.core", "horovod_abs.sim")) == set()


def test_the_packages_are_looked_at() -> None:
    assert {"engine", "ledger", "clocks", "scaling"} <= {file.stem for _, file in CORE}
    assert "cluster" in {file.stem for _, file in SIM}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", {"time"}),
        ("from time import sleep", {"time"}),
        ("def f():\n    import socket", {"socket"}),
        ("import torch.nn", {"torch.nn"}),
        ("from mpi4py import MPI", {"mpi4py"}),
        ("from horovod_abs.torch import optimizer", {"horovod_abs.torch"}),
        ("from horovod_abs import mpi", {"horovod_abs.mpi"}),
        ("from .. import mpi", {"horovod_abs.mpi"}),
        ("from ..sim import cluster", {"horovod_abs.sim"}),
        ("open('x')", {"open"}),
        ("from . import ledger\nfrom .clocks import Clock\nfrom horovod_abs.core import engine", set()),
        ("import math\nimport numpy.linalg\nengine.open()", set()),
    ],
)
def test_what_may_not_be_used_is_found(source: str, found: set[str]) -> None:
    assert foreign(source, "horovod_abs.core", allowed=("numpy", "horovod_abs.core")) == found
