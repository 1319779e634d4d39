"""Horovod for clusters of unequal workers: every worker computes all the time, at its own speed.

Import the binding for your framework in the place of Horovod's: ``import horovod_abs.torch as hvd``
or ``import horovod_abs.tensorflow as hvd``.
"""

__version__ = "0.1.0"
