"""The notebooks run from top to bottom, what they assert holds, and they are committed as they should be."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.notebooks import executing

MOST_BYTES = 400_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", executing.NAMES)
def test_runs_from_top_to_bottom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")  # an image takes longer to build than a test may
    executing.execute(name)


@pytest.mark.parametrize("name", executing.NAMES)
def test_is_committed_with_outputs_and_nothing_private(name: str) -> None:
    path = executing.FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = path.read_text()
    assert executing.tidy(nbformat.from_dict(notebook)) == notebook
    assert len(text) < MOST_BYTES
    assert "image/png" in text
    assert not any(place in text for place in ("/home/", "/root/", "/tmp/", "/work/", "site-packages"))
    assert "**Next:**" in notebook.cells[-1].source


@pytest.mark.parametrize("name", executing.NAMES)
def test_links_lead_somewhere(name: str) -> None:
    notebook = nbformat.read(executing.FOLDER / f"{name}.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (executing.FOLDER / link).exists()] == []


def test_an_assertion_that_fails_fails_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = nbformat.v4.new_code_cell("assert 1 + 1 == 3")
    monkeypatch.setattr(nbformat, "read", lambda *_, **__: nbformat.v4.new_notebook(cells=[cell]))
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executing.execute("any")
