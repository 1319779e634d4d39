"""The command line is quick, needs no framework, and turns failures into words and exit statuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from horovod_abs import __version__, doctor
from horovod_abs.cli import app
from horovod_abs.doctor import Check
from horovod_abs.install import wheel
from horovod_abs.install.problems import Problem, SetupError


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_help_names_the_commands() -> None:
    status, output = run("--help")
    assert status == 0
    assert "install-horovod" in output
    assert "doctor" in output


def test_version() -> None:
    assert run("--version") == (0, f"horovod-abs {__version__}\n")


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "tensorflow", "horovod", "numpy", "mpi4py", "matplotlib"}
    code = f"import sys, horovod_abs.cli; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_options_reach_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(wheel, "install_horovod", lambda **options: given.update(options))
    arguments = ["--mpi", "system", "--jobs", "3", "--gpu", "nccl", "--nccl-home", "/nccl", "--force"]
    assert run("install-horovod", *arguments)[0] == 0
    assert {name: str(value) for name, value in given.items()} == {
        "mpi": "system",
        "gpu": "nccl",
        "nccl_home": "/nccl",
        "cuda_home": "None",
        "jobs": "3",
        "force": "True",
    }


def test_what_is_missing_is_printed_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise SetupError(Problem("no compiler [here]", "apt-get install g++"), Problem("no disk", "buy one"))

    monkeypatch.setattr(wheel, "install_horovod", fail)
    status, output = run("install-horovod")
    assert status == 1
    for words in ("no compiler [here]", "apt-get install g++", "no disk", "buy one"):
        assert words in output
    assert "Traceback" not in output


def test_doctor_hands_its_exit_status_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Check("MPI launcher", "failure", "none", "get one")])
    status, output = run("doctor")
    assert status == 1
    assert "get one" in output
