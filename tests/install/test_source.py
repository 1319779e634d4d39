"""The edits fit the released source, and stop the build where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_abs.install import source
from horovod_abs.install.problems import SetupError
from horovod_abs.install.source import EDITS, Change, Edit
from horovod_abs.install.wheel import cache_dir

CHANGES = [change for edit in EDITS for change in edit.changes]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in which each file consists of just what the edits look for."""
    for change in CHANGES:
        path = tmp_path / change.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else ""
        path.write_text(f"{before}before\n{change.old}\nafter\n")
    return tmp_path


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.reason[:30])
def test_edit_replaces_its_text_and_nothing_else(tree: Path, edit: Edit) -> None:
    expected = {change.file: (tree / change.file).read_text() for change in CHANGES}
    for change in edit.changes:
        expected[change.file] = expected[change.file].replace(change.old, change.new)
    edit.apply(tree)
    assert {file: (tree / file).read_text() for file in expected} == expected


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.file)
def test_change_that_does_not_fit_raises(tree: Path, change: Change) -> None:
    path = tree / change.file
    path.write_text(path.read_text().replace(change.old, "something else"))
    with pytest.raises(SetupError, match=change.file) as caught:
        change.apply(tree)
    assert "0 times instead of once" in str(caught.value)


def test_change_that_fits_twice_or_whose_file_is_missing_raises(tree: Path) -> None:
    change = CHANGES[0]
    path = tree / change.file
    path.write_text(path.read_text() * 2)
    with pytest.raises(SetupError, match="2 times"):
        change.apply(tree)
    path.unlink()
    with pytest.raises(SetupError, match="0 times"):
        change.apply(tree)


def test_no_edit_hides_the_text_of_another(tree: Path) -> None:
    for edit in EDITS:
        edit.apply(tree)
    assert all(edit.is_in(tree) for edit in EDITS)


def test_an_unedited_launcher_is_noticed(tree: Path) -> None:
    lacking = [edit for edit in EDITS if not edit.is_in(tree)]
    assert any("more ranks than cores" in edit.reason for edit in lacking)
    assert any("distutils" in edit.reason for edit in lacking)


def test_edits_apply_to_the_released_source(tmp_path: Path) -> None:
    sdist = cache_dir() / "source" / source.SDIST_NAME
    if not sdist.exists():
        pytest.skip("the source package is not in the cache; `horovod-abs install-horovod --force` fetches it")
    source.verify(sdist)
    root = source.unpack(sdist, tmp_path)
    assert "CMAKE_CXX_STANDARD 17" in (root / "CMakeLists.txt").read_text()
    for file in ("mpi_run.py", "js_run.py", "__init__.py"):
        text = (root / "horovod" / "runner" / file).read_text()
        compile(text, file, "exec")
        assert "distutils" not in text


def test_a_package_with_another_checksum_is_refused(tmp_path: Path) -> None:
    package = tmp_path / source.SDIST_NAME
    package.write_bytes(b"not Horovod")
    with pytest.raises(SetupError, match="SHA-256") as caught:
        source.fetch_sdist(tmp_path, {})
    assert source.SDIST_SHA256 in str(caught.value)
    assert f"rm {package}" in str(caught.value)


def test_digest_follows_the_changes_and_not_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = source.edits_digest()
    monkeypatch.setattr(source, "EDITS", tuple(Edit("other words", edit.changes) for edit in EDITS))
    assert source.edits_digest() == digest
    monkeypatch.setattr(source, "EDITS", EDITS[:-1])
    assert source.edits_digest() != digest
