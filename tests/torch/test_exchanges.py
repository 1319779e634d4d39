"""The choices that a user makes with ``exchange=`` are checked when they are made; here :class:`Gradients`."""

from __future__ import annotations

from typing import Any

import pytest

import horovod_abs.torch as hvd


@pytest.mark.parametrize("delay", [2, -1, 0.5, None])
def test_the_delay_is_zero_or_one_round(delay: Any) -> None:
    with pytest.raises(ValueError, match="takes delay=0 or delay=1, not"):
        hvd.Gradients(delay=delay)


def test_equal_choices_are_equal_and_look_it() -> None:
    assert hvd.Gradients() == hvd.Gradients(delay=1)
    assert repr(hvd.Gradients()) == repr(hvd.Gradients(1)) != repr(hvd.Gradients(0))
