"""The API reference builds, without a warning, has a page for every module, and shows docstrings as they are meant."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.api import LEFT_OUT, without_double_colons

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one reads on the page of each module."""
    folder = tmp_path_factory.mktemp("api")
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.documentation.api", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "index.html").is_file()
    return {
        ".".join(page.relative_to(folder).with_suffix("").parts): html.unescape(re.sub("<[^>]+>", "", page.read_text()))
        for page in folder.rglob("horovod_abs*/**/*.html")
    }


@pytest.mark.timeout(180)
def test_every_module_has_its_page(pages: dict[str, str]) -> None:
    sources = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "horovod_abs").glob("*/**/*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in sources}
    shown = {module for module in modules if not module.startswith(LEFT_OUT)}
    assert shown - pages.keys() == set()
    assert not any(page.startswith(LEFT_OUT) for page in pages)


def test_a_binding_shows_what_is_ours_and_how_to_use_it(pages: dict[str, str]) -> None:
    page = pages["horovod_abs.torch"]
    assert (
        ">>> loader = DataLoader(train_set, batch_size=16, sampler=hvd.AdaptiveSampler(train_set, optimizer))" in page
    )
    assert "exchange:  What is averaged: Gradients (the default) or ModelUpdates." in page
    assert "grouped_allreduce_async" not in page


def test_the_code_before_a_block_ends_in_one_colon() -> None:
    assert without_double_colons("As this does::\n\n    code") == "As this does:\n\n    code"
    assert without_double_colons("It does.\n\n::\n\n    code").count(":") == 0
