"""One Horovod process without a launcher, for tests that need no other rank."""

from __future__ import annotations

import pytest

import horovod_abs.torch as hvd


@pytest.fixture(scope="session")
def single_rank() -> None:
    """Horovod with one rank, in this process."""
    hvd.init()
    assert hvd.size() == 1
