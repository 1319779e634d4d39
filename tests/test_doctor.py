"""The doctor finds what is broken, says how to repair it, and always ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from horovod_abs import doctor
from horovod_abs.doctor import Check
from horovod_abs.install import installed
from horovod_abs.install.problems import Problem, SetupError
from horovod_abs.install.target import Target
from tests.install.samples import HERE, WORKING


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH, and where the environment's programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "scripts_dir", lambda: tmp_path)
    return tmp_path


def add(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_compiler(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_compiler().status == "warning", "a Horovod that is built needs none"
    monkeypatch.setattr(installed, "version", lambda: "")
    check = doctor.check_compiler()
    assert check.status == "failure"
    assert "apt-get install g++" in check.remedy
    add(programs, "c++", "echo 'my compiler 1.2'")
    assert doctor.check_compiler() == Check("C++ compiler", "ok", "my compiler 1.2")


def test_mpirun(programs: Path) -> None:
    check = doctor.check_mpirun()
    assert (check.status, check.detail) == ("failure", "there is no mpirun")
    assert "install-horovod" in check.remedy
    add(programs, "mpirun", "exit 1")
    assert "does not run" in doctor.check_mpirun().detail
    add(programs, "mpirun", "echo 'mpirun (Open MPI) 9'")
    assert doctor.check_mpirun().detail == f"mpirun (Open MPI) 9, {programs}/mpirun"


def test_a_missing_framework_is_a_warning_and_a_broken_one_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "framework_versions", lambda names: {names[0]: ""})
    check, version = doctor.check_framework("tensorflow")
    assert (check.status, version) == ("warning", "")
    assert "pip install tensorflow-cpu, then" in check.remedy

    def broken(names: list[str]) -> dict[str, str]:
        raise SetupError(Problem("tensorflow cannot be imported", "reinstall it"))

    monkeypatch.setattr(doctor, "framework_versions", broken)
    check, _ = doctor.check_framework("tensorflow")
    assert (check.status, check.remedy) == ("failure", "reinstall it")


def statuses(abilities: installed.Abilities) -> list[str]:
    checks = list(doctor.check_horovod("torch", abilities))
    assert all(check.remedy for check in checks if check.status != "ok")
    return [check.status for check in checks]


def test_horovod() -> None:
    assert statuses(WORKING) == ["ok", "ok"]
    assert statuses(replace(WORKING, gloo=False)) == ["failure", "ok"]
    assert statuses(installed.Abilities(error="undefined symbol")) == ["failure"]


def test_horovod_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda: "")
    (check,) = doctor.check_horovod("torch", WORKING)
    assert (check.status, check.remedy) == ("failure", "horovod-abs install-horovod")


def test_mpi4py_on_another_library() -> None:
    two = replace(WORKING, mpi_libraries=("/a/libmpi.so.40", "/b/libmpi.so.40"))
    assert statuses(two) == ["ok", "failure"]
    assert statuses(replace(WORKING, mpi4py_error="cannot load MPI library")) == ["ok", "failure"]


def test_a_build_for_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": HERE.torch, "tensorflow": ""}
    now = Target.detect("pypi", "none", {}, versions)
    monkeypatch.setattr(installed, "target", lambda: now)
    assert doctor.check_build(versions).status == "ok"
    monkeypatch.setattr(installed, "target", lambda: replace(now, torch="1.0"))
    check = doctor.check_build(versions)
    assert check.status == "warning"
    assert "torch 1.0" in check.detail
    monkeypatch.setattr(installed, "target", lambda: None)
    assert "not built by horovod-abs" in doctor.check_build(versions).detail


def test_two_ranks_that_hang_fail_or_lie(programs: Path) -> None:
    add(programs, "horovodrun", f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    hung = doctor.check_allreduce("torch", "mpi", timeout=0.5)
    assert (hung.status, hung.detail) == ("failure", "did not end within 0.5 s")
    add(programs, "horovodrun", "echo 'no such interface' >&2; exit 3")
    failed = doctor.check_allreduce("torch", "gloo", timeout=30)
    assert failed.status == "failure"
    assert "exit status 3" in failed.detail
    assert "no such interface" in failed.detail
    add(programs, "horovodrun", "echo ranks=1 sum=1.0; echo ranks=1 sum=1.0")
    assert doctor.check_allreduce("torch", "mpi", timeout=30).status == "failure", "two lone ranks are not a run"
    (programs / "horovodrun").unlink()
    assert "No such file" in doctor.check_allreduce("torch", "mpi", timeout=30).detail


def test_run_bounded_ends_the_whole_tree() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    status, output = doctor.run_bounded([sys.executable, "-c", code], timeout=2)
    assert status is None
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(output)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(output))


def test_report_as_json_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    fine, poor = Check("a", "ok", "works"), Check("b", "warning", "not installed", "pip install it")
    broken = Check("c", "failure", "broken", "repair it")
    assert doctor.report([fine, poor], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    assert doctor.report([fine, poor, broken], as_json=True) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is False
    assert answer["checks"][2] == {"name": "c", "status": "failure", "detail": "broken", "remedy": "repair it"}
    assert doctor.report([broken]) == 1
    assert "repair it" in capsys.readouterr().out


def test_without_a_framework_the_doctor_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "framework_versions", lambda names: {names[0]: ""})
    last = list(doctor.examine())[-1]
    assert (last.name, last.status) == ("Frameworks", "failure")


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_this_environment_is_healthy() -> None:
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}  # the environment is not activated
    done = subprocess.run(
        [sys.executable, "-m", "horovod_abs", "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    answer = json.loads(done.stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert done.returncode == 0, checks
    assert answer["healthy"]
    assert checks["Two ranks over MPI"]["status"] == "ok"
    assert checks["Two ranks over Gloo"]["status"] == "ok"
    assert checks["mpi4py and Horovod for PyTorch"]["detail"].count("libmpi.so") == 1
