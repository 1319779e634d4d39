"""Builds the API reference of the package, as web pages, out of its docstrings.

python -m tests.documentation.api build/api
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("PDOC_ALLOW_EXEC", "1")  # the frameworks ask the machine what it is

import pdoc
import pdoc.docstrings
import pdoc.render

BINDINGS = ("horovod_abs.torch", "horovod_abs.tensorflow", "horovod_abs.tensorflow.keras")
LEFT_OUT = ("horovod_abs.bench", "horovod_abs.examples")
"""Programs, which `--help` describes."""


def build(folder: Path) -> None:
    """Write the pages."""
    for name in BINDINGS:
        leave_horovods_names_out(importlib.import_module(name))
    from_restructured_text = pdoc.docstrings.rst
    pdoc.docstrings.rst = lambda text, file: from_restructured_text(without_double_colons(text), file)
    # It looks for the type of a field that a class inherits in the class's own module.
    warnings.filterwarnings("ignore", r"Error parsing type annotation Scaling for .*\.payloads\.Options\.__init__")
    pdoc.render.configure(docformat="google", template_directory=Path(__file__).parent)
    pdoc.pdoc("horovod_abs", *(f"!{name}" for name in LEFT_OUT), output_directory=folder)


def leave_horovods_names_out(module: Any) -> None:
    """Of a module that has all that Horovod's has, show what is ours, and its submodules."""
    ours = [name for name in module.__all__ if _is_ours(getattr(module, name))]
    inside = [found.name for found in pkgutil.iter_modules(module.__path__)]
    module.__all__ = sorted({*ours, *inside})


def _is_ours(thing: Any) -> bool:
    return not isinstance(thing, ModuleType) and str(getattr(thing, "__module__", "")).startswith("horovod_abs")


def without_double_colons(text: str) -> str:
    """Where a block of code follows, pdoc takes the indentation alone for its mark."""
    return re.sub(r"(?m)^\s*::$", "", text).replace("::\n\n", ":\n\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")
