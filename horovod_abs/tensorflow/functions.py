"""Collectives of Horovod's that take Keras's variables too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd

from horovod_abs.tensorflow.flat import native


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """Horovod's ``broadcast_variables``, for TensorFlow's and for Keras's variables.

    Args:
        variables: Whose values are broadcast, e.g. ``model.variables`` and ``optimizer.variables``.
        root_rank: The rank whose values all take over.
        process_set: The ranks that take part.
        inplace: Whether to do without temporary copies.
    """
    plain = [native(variable) for variable in variables]
    return hvd.broadcast_variables(plain, root_rank, process_set, inplace)
