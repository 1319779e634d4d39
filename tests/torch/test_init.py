"""``hvd.init``: what has to come before and after Horovod's own."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import pytest

import horovod_abs.torch as hvd
from horovod_abs import mpi, shutdown


@pytest.mark.parametrize("size", [1, 3])
def test_mpi_comes_before_horovod_and_the_end_of_the_process_after(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(mpi, "prepare", lambda: calls.append("mpi"))
    monkeypatch.setattr(shutdown, "prepare", lambda: calls.append("shutdown"))
    monkeypatch.setattr(horovod, "init", lambda *arguments, **options: calls.append((arguments, options)))
    monkeypatch.setattr(horovod, "size", lambda: size)
    hvd.init([0, 1], process_sets="dynamic")
    assert calls == ["mpi", (([0, 1],), {"process_sets": "dynamic"})] + (["shutdown"] if size > 1 else [])
