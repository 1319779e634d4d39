"""Code in docstrings and guides, and how to run a piece of it.

An example takes a model, data, an optimizer and the like as given, so that it is as short as a reader wants it. What
is given stands on a stage, of PyTorch's or of TensorFlow's.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from tests.test_documentation import PAGES, ROOT, python_blocks

Framework = Literal["torch", "tensorflow"]
LOG = Path("runs", "mnist.jsonl")
"""The run log that examples read."""
SAMPLES = 64
"""In the data sets that examples are given."""


# -- what there is -----------------------------------------------------------------------------------------------------


def guide_examples() -> dict[str, Framework]:
    """Blocks of Python in README and guides, by name, and what they are written for."""
    found: dict[str, Framework] = {}
    for page in PAGES:
        framework: Framework = "torch"
        for number, source in enumerate(python_blocks(page)):
            if "horovod_abs.torch" in source or "horovod_abs.tensorflow" in source:
                framework = "tensorflow" if "horovod_abs.tensorflow" in source else "torch"
            found[f"{page.relative_to(ROOT)} {number}"] = framework
    return found


def docstring_examples() -> dict[str, Framework]:
    """Modules with examples in their docstrings, and what they need."""
    paths = sorted(path for path in (ROOT / "horovod_abs").rglob("*.py") if ">>> " in path.read_text())
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {module: "tensorflow" if ".tensorflow" in module else "torch" for module in modules}


# -- running -----------------------------------------------------------------------------------------------------------


def run(name: str, stage: Any) -> None:
    """Run a guide's block, or all examples in a module's docstrings.

    Raises:
        Exception: what the block has raised.
        AssertionError: an example has printed something else than its docstring says, or has raised.
    """
    page, _, number = name.partition(" ")
    if number:
        run_block(list(python_blocks(ROOT / page))[int(number)], name, stage)
    else:
        run_docstrings(name, stage)


def run_block(source: str, name: str, stage: Any) -> None:
    """Run a block of a guide; a loop that trains must have trained."""
    code: CodeType = compile(source, name, "exec")
    namespace = given(stage, source)
    exec(code, namespace)
    if "optimizer.epoch(" in source:
        samples = namespace["optimizer"].samples_seen
        assert samples > 0, f"{name}: nothing was trained"
        whole = "AdaptiveSampler" in source or "adaptive_dataset" in source
        assert not whole or samples % SAMPLES == 0, f"{name}: {samples} samples are not whole epochs"


def run_docstrings(module_name: str, stage: Any) -> None:
    """Run the examples in the docstrings of a module."""
    module = importlib.import_module(module_name)
    told: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    ran = 0
    for test in doctest.DocTestFinder().find(module, module_name):
        if test.examples:
            source = "".join(example.source for example in test.examples)
            test.globs.update(given(stage, source))
            runner.run(test, out=told.append)
            ran += 1
    assert ran, f"{module_name} has no example that doctest finds"
    assert not told, "".join(told)


def given(stage: Any, source: str) -> dict[str, Any]:
    """What a piece of code takes from a stage: names that it reads and has not bound in a statement before.

    All are made at once: an optimizer must be made by every rank, also where only rank 0 uses it.
    """
    bound: set[str] = set()
    names: dict[str, None] = {}
    for statement in ast.parse(source).body:
        nodes = list(ast.walk(statement))
        read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        names.update(dict.fromkeys(name for name in read if name not in bound))
        bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        bound |= {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    return {name: getattr(stage, name) for name in names if hasattr(stage, name)}


@contextmanager
def folder(path: Path, log: Path) -> Iterator[None]:
    """A new folder to run an example in, with the log that it may read."""
    before = Path.cwd()
    (path / LOG.parent).mkdir(parents=True)
    shutil.copy(log, path / LOG)
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
