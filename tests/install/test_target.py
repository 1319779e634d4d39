"""A build is reused only where all that it depends on is the same."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from horovod_abs.install import target
from horovod_abs.install.problems import SetupError
from horovod_abs.install.target import Target
from tests.install.samples import HERE


@pytest.mark.parametrize("name", [field.name for field in fields(Target)])
def test_every_ingredient_is_in_the_key(name: str) -> None:
    assert replace(HERE, **{name: "another"}).key != HERE.key
    assert replace(HERE).key == HERE.key


def test_differences_say_what_has_changed() -> None:
    newer = replace(HERE, torch="2.14.0 cxx11abi=1")
    assert newer.differences(HERE) == ["it was built for torch 2.13.0 cxx11abi=1, here is 2.14.0 cxx11abi=1"]
    assert "here is 2.21" in "".join(replace(HERE, tensorflow="2.21").differences(HERE))


def test_another_compiler_does_not_spoil_what_was_built() -> None:
    assert replace(HERE, compiler="").differences(HERE) == []


def test_target_survives_the_trip_through_the_wheel() -> None:
    assert Target.from_module(HERE.to_module()) == HERE


@pytest.mark.parametrize("text", ["", "TARGET = {", "TARGET = {'other': 1}", "TARGET = f()"])
def test_a_stamp_of_another_form_is_no_target(text: str) -> None:
    assert Target.from_module(text) is None


def test_without_any_framework_there_is_nothing_to_build_for() -> None:
    with pytest.raises(SetupError, match="pip install torch or"):
        Target.detect("pypi", "none", {}, versions={"torch": "", "tensorflow": ""})


def test_a_framework_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"torch .* cannot be imported: .*libtorch is broken"):
        target.framework_versions(["torch"])


def test_gpu_options_come_from_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_NCCL_LINK", "SHARED")
    monkeypatch.setenv("HOROVOD_TIMELINE", "not a build option")
    assert target.gpu_options("none", None, None) == {"HOROVOD_NCCL_LINK": "SHARED"}
    assert target.gpu_options("nccl", Path("/nccl"), Path("/cuda")) == {
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": "/nccl",
        "HOROVOD_CUDA_HOME": "/cuda",
    }


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    assert target.compiler() is None
    assert target.compiler_version() == ""
    monkeypatch.setenv("CXX", "sh -c")
    assert target.compiler() == ["sh", "-c"]
