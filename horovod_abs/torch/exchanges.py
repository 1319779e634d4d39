"""What is averaged; see :mod:`horovod_abs.exchanges`."""

from horovod_abs.exchanges import Exchange, Gradients, ModelUpdates, OuterOptimizer, name_of

__all__ = ["Exchange", "Gradients", "ModelUpdates", "OuterOptimizer", "name_of"]
