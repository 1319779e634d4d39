"""What ``record=PATH`` writes down of a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import horovod
import torch

from horovod_abs.core.clocks import Clock
from horovod_abs.driver import Driver
from horovod_abs.exchanges import Exchange, described
from horovod_abs.observe.recorder import Facts, Recorder


def open_recorder(
    path: str | Path,
    driver: Driver,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    exchange: Exchange,
    clock: Clock,
    options: Mapping[str, Any],
) -> Recorder:
    """A recorder of this rank's driver, which must be the first of its ranks.

    Args:
        path: The run log.
        driver: Whose run it is.
        optimizer: Whose parameters and learning rates are written down.
        names: Its parameters' names, by ``id``.
        exchange: What is averaged.
        clock: When rounds end.
        options: Other options, as plain values.

    Raises:
        OSError: the file cannot be opened.
    """
    facts = Facts(
        software={"torch": torch.__version__, "horovod": horovod.__version__},
        exchange=described(exchange),
        clock=repr(clock),
        options=options,
        optimizer=type(optimizer).__name__,
        seed=torch.initial_seed(),
    )
    return Recorder(
        path,
        driver,
        facts,
        learning_rates=lambda: [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
        save_parameters=lambda file, rounds: save_parameters(file, rounds, optimizer, names),
    )


def save_parameters(path: Path, rounds: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Write an optimizer's parameters to a file."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = {
        "round": rounds,
        "names": [names.get(id(p), "") for p in parameters],
        "parameters": [p.detach().cpu() for p in parameters],
    }
    torch.save(saved, path)
