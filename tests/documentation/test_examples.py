"""Examples in docstrings and guides run, and do what they say.

Those for PyTorch in docstrings run in this process, on one rank. The blocks of README and guides, and all that is for
TensorFlow, run on two ranks, so that what only rank 0 does, and what every rank must do, is put to the test as well.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

import horovod_abs.torch as hvd
from tests.documentation import examples, torch_stage
from tests.launched import Launch

IN_GUIDES, IN_DOCSTRINGS = examples.guide_examples(), examples.docstring_examples()
FOR_TENSORFLOW = [name for name, framework in {**IN_GUIDES, **IN_DOCSTRINGS}.items() if framework == "tensorflow"]
GUIDES_FOR_TORCH = [name for name, framework in IN_GUIDES.items() if framework == "torch"]
DOCSTRINGS_FOR_TORCH = [name for name, framework in IN_DOCSTRINGS.items() if framework == "torch"]
NEED_NONE = {"Clock", "DistributedOptimizerMixin", "RoundRecord", "broadcast_optimizer_state", "join", "init"}
"""What one does not make or call by itself, and Horovod's own."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod on one rank, and the log of a run."""
    hvd.init()
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    torch_stage.record(path)
    return path


@pytest.mark.parametrize("module", DOCSTRINGS_FOR_TORCH)
def test_a_docstrings_examples_run(module: str, log: Path, tmp_path: Path) -> None:
    with examples.folder(tmp_path / "here", log):
        examples.run(module, torch_stage.Stage())


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launch]:
    """Runs all examples of a framework, when it is first asked for one."""

    @functools.cache
    def launch(framework: str) -> Launch:
        names = FOR_TENSORFLOW if framework == "tensorflow" else GUIDES_FOR_TORCH
        return Launch("tests.documentation.worker", "mpi", 2, [framework, *names], tmp_path_factory.mktemp(framework))

    return launch


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*GUIDES_FOR_TORCH, *FOR_TENSORFLOW])
def test_an_example_runs_on_two_ranks(name: str, on_two_ranks: Callable[[str], Launch]) -> None:
    on_two_ranks("tensorflow" if name in FOR_TENSORFLOW else "torch").check(name)


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("hvd.NoSuchThing()", "NoSuchThing"),
        ("for x, y in optimizer.epoch(loader):\n    pass", "nothing was trained"),
        ("nowhere", "nowhere"),
    ],
)
def test_a_block_that_is_wrong_fails(block: str, error: str, log: Path) -> None:
    with pytest.raises((AttributeError, AssertionError, NameError), match=error):
        examples.run_block(block, "a guide", torch_stage.Stage())


def test_a_docstring_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text('"""Adds up.\n\n>>> 1 + 1\n3\n"""\n')
    (tmp_path / "silent.py").write_text('"""Says nothing."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        examples.run_docstrings("wrong", torch_stage.Stage())
    with pytest.raises(AssertionError, match="no example"):
        examples.run_docstrings("silent", torch_stage.Stage())


def test_what_a_user_makes_or_calls_has_an_example() -> None:
    binding = importlib.import_module("horovod_abs.torch")
    ours = {
        name: thing
        for name, thing in vars(binding).items()
        if str(getattr(thing, "__module__", "")).startswith("horovod_abs.") and name in binding.__all__
    }
    makes = {name for name, thing in ours.items() if not isinstance(thing, type) or not issubclass(thing, Exception)}
    assert len(makes - NEED_NONE) > 10
    assert {name for name in makes - NEED_NONE if ">>> " not in (ours[name].__doc__ or "")} == set()
