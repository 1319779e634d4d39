"""A Horovod that works is left alone; one that does not is replaced, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from horovod_abs.install import installed
from horovod_abs.install.installed import Abilities
from tests.install.samples import HERE, WORKING


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An installed Horovod that does; each test breaks something."""
    monkeypatch.setattr(installed, "version", lambda: "0.28.1")
    monkeypatch.setattr(installed, "target", lambda: HERE)
    monkeypatch.setattr(installed, "probe", lambda framework: WORKING)
    return monkeypatch


def test_one_that_works_will_do(horovod: pytest.MonkeyPatch) -> None:
    assert installed.why_not(HERE) == ""


def test_none_at_all(horovod: pytest.MonkeyPatch) -> None:
    horovod.setattr(installed, "version", lambda: "")
    assert installed.why_not(HERE) == "Horovod is not installed"


def test_one_for_another_pytorch(horovod: pytest.MonkeyPatch) -> None:
    assert "torch 2.13.0" in installed.why_not(replace(HERE, torch="2.14.0"))


def test_one_that_lacks_a_framework_installed_since(horovod: pytest.MonkeyPatch) -> None:
    assert "tensorflow none, here is 2.21.0" in installed.why_not(replace(HERE, tensorflow="2.21.0"))


def test_one_that_cannot_be_imported(horovod: pytest.MonkeyPatch) -> None:
    horovod.setattr(installed, "probe", lambda framework: Abilities(error="undefined symbol"))
    assert installed.why_not(HERE) == "horovod.torch cannot be imported: undefined symbol"


@pytest.mark.parametrize("lacking", ["MPI", "Gloo"])
def test_one_without_a_controller(horovod: pytest.MonkeyPatch, lacking: str) -> None:
    broken = replace(WORKING, **{lacking.lower(): False})
    horovod.setattr(installed, "probe", lambda framework: broken)
    assert f"without {lacking}" in installed.why_not(HERE)


def test_one_built_by_others_needs_a_launcher_that_works(horovod: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher = tmp_path / "horovod" / "runner" / "js_run.py"
    launcher.parent.mkdir(parents=True)
    horovod.setattr(installed, "target", lambda: None)
    horovod.setattr(installed, "root", lambda: tmp_path)
    launcher.write_text("from distutils.spawn import find_executable\n")
    assert "distutils" in installed.why_not(HERE)
    launcher.write_text("from shutil import which as find_executable\n")
    assert installed.why_not(HERE) == ""


def test_probe_reports_why_an_import_failed() -> None:
    assert "No module named 'horovod.nothing'" in installed.probe("nothing").error
