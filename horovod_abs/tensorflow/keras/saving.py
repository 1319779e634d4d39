"""Models with their optimizers, loaded and wrapped again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
from horovod.tensorflow.compression import Compression

from horovod_abs.tensorflow.optimizer import DistributedOptimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> keras.Model:
    """Load a compiled model and distribute its optimizer; the optimizer's state is kept.

    Args:
        filepath: What ``model.save`` has written, with a plain or a distributed optimizer.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Other things that Keras does not know, by name.
        compression: See :func:`DistributedOptimizer`.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.
        options: Further keywords of :func:`DistributedOptimizer`.

    Raises:
        ValueError: the model was saved without an optimizer, or legacy optimizers are asked for.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers. Leave it out")
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is None:
        raise ValueError(f"{filepath}: the model was saved without an optimizer. Compile it before saving")
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
