"""Collectives of Horovod's that take Keras's variables too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd

from horovod_abs.tensorflow.flat import native
from horovod_abs.tensorflow.wire import Wire, open_wire

_wires: dict[int, Wire] = {}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> None:
    """Give the ranks the values that one of them has, of TensorFlow's or of Keras's variables.

    Horovod's own knows Keras's variables neither themselves nor by names that are the same on all ranks; here they
    travel by their order.

    Args:
        variables: In the same order on every rank, e.g. ``[*model.variables, *optimizer.variables]``.
        root_rank: The rank whose values all take over.
        process_set: The ranks that take part.
        inplace: Has no effect: a copy lives until the broadcast is over.
    """
    plain = [native(variable) for variable in variables]
    number = process_set.process_set_id
    if number not in _wires:
        _wires[number] = open_wire(process_set)
    wire = _wires[number]
    values = wire.broadcast([variable.read_value() for variable in plain], f"horovod_abs.variables.{number}", root_rank)
    for variable, value in zip(plain, values, strict=True):
        variable.assign(value)
