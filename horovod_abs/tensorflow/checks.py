"""What of Keras's is refused; the rest is in :mod:`horovod_abs.checks`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_abs.checks import refuse_environment, refuse_keywords
from horovod_abs.exchanges import Exchange, ModelUpdates


def refuse_unsupported(optimizer: Any, exchange: Exchange, keywords: Mapping[str, Any]) -> None:
    """Raise :class:`ValueError` for what would not keep its meaning here, naming the alternative.

    Args:
        optimizer: The user's optimizer.
        exchange: What is to be averaged.
        keywords: Horovod's; see :func:`horovod_abs.checks.refuse_keywords`.
    """
    refuse_keywords(keywords, hvd.Average)
    refuse_environment()
    if hasattr(optimizer, "_rounds"):
        raise ValueError("the optimizer is already distributed: wrap the plain Keras optimizer, once")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is not an optimizer of Keras 3: tf_keras and "
            "tf.compat.v1 are not supported. Use one of keras.optimizers"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer skips steps by gradients that only this rank sees: use mixed_bfloat16, which needs no "
            "loss scaling, and wrap the optimizer inside"
        )
    refuse_options(optimizer, exchange)
    if tf.distribute.has_strategy():
        raise ValueError(
            "a tf.distribute strategy is active: Horovod runs one process for each device. Leave the strategy out"
        )


def refuse_options(optimizer: Any, exchange: Exchange) -> None:
    """Raise :class:`ValueError` for options that act on micro-batches or unscaled gradients."""
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "gradient_accumulation_steps would count merges, not micro-batches: a round accumulates by itself. For n "
            "micro-batches in a round use clock=CountClock(n)"
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError("loss_scale_factor is for float16: use mixed_bfloat16, which needs no loss scaling")
    if optimizer.use_ema and isinstance(exchange, ModelUpdates):
        raise ValueError(
            "use_ema with ModelUpdates would average each rank's own model: leave it out, or use exchange=Gradients()"
        )


def refuse_loss_scaling(optimizer: Any) -> None:
    """Raise :class:`ValueError` if a living LossScaleOptimizer is around the optimizer."""
    kind = keras.optimizers.LossScaleOptimizer
    for around in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
        if around.inner_optimizer is optimizer:
            raise ValueError(
                "a LossScaleOptimizer is around the distributed optimizer, and skips steps by gradients that only this "
                "rank sees: use mixed_bfloat16, which needs no loss scaling, in place of mixed_float16"
            )


def describe_variables(variables: Iterable[tf.Variable]) -> str:
    """Shape and dtype of each variable in order; Keras numbers names by what was made before, so they may differ."""
    return "\n".join(f"{tuple(variable.shape)} {variable.dtype.name}" for variable in variables)
