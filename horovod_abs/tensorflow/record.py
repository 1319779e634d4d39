"""What ``record=PATH`` writes down of a Keras optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import horovod
import keras
import numpy as np
import tensorflow as tf

from horovod_abs.core.clocks import Clock
from horovod_abs.driver import Driver
from horovod_abs.exchanges import Exchange, described
from horovod_abs.observe.recorder import Facts, Recorder
from horovod_abs.tensorflow.payloads import ExchangedSum


def open_recorder(
    path: str | Path,
    driver: Driver,
    optimizer: Any,
    payload: ExchangedSum,
    exchange: Exchange,
    clock: Clock,
    options: Mapping[str, Any],
) -> Recorder:
    """A recorder of this rank's driver, which must be the first of its ranks.

    Args:
        path: The run log.
        driver: Whose run it is.
        optimizer: Whose learning rate is written down.
        payload: Whose parameters are.
        exchange: What is averaged.
        clock: When rounds end.
        options: Other options, as plain values.

    Raises:
        OSError: the file cannot be opened.
    """
    facts = Facts(
        software={"tensorflow": tf.__version__, "keras": keras.__version__, "horovod": horovod.__version__},
        exchange=described(exchange),
        clock=repr(clock),
        options=options,
        optimizer=type(optimizer).__name__,
        seed=None,
    )
    return Recorder(
        path,
        driver,
        facts,
        learning_rates=lambda: [float(optimizer.learning_rate)],
        save_parameters=lambda file, rounds: save_parameters(file, rounds, payload),
    )


def save_parameters(path: Path, rounds: int, payload: ExchangedSum) -> None:
    """Write the parameters to a file, in NumPy's format: ``round``, and ``0``, ``1``, … in the optimizer's order."""
    values = {str(index): parameter.numpy() for index, parameter in enumerate(payload.parameters)}
    with path.open("wb") as file:
        np.savez(file, round=rounds, **values)
