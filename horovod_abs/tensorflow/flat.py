"""One contiguous tensor in place of many: what is sent in one piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Gradient = Any
"""A tensor, or ``None``."""

_ALIGNMENT_BYTES = 64
"""Where a part of a flat tensor begins at a multiple of this, TensorFlow takes it out without copying it."""


class Layout:
    """Where the elements of each of some variables lie in flat tensors, one for each dtype.

    Sums of half-precision gradients are kept in float32 (design rule 8). Between variables there may be a few zeros, so
    that each begins where it can be taken out without a copy.

    Args:
        variables: Whose gradients are laid flat.

    Attributes:
        dtypes: Of the flat tensors.
        sizes: Numbers of elements of the flat tensors.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._groups: dict[tf.DType, list[int]] = {}
        for index, variable in enumerate(variables):
            self._groups.setdefault(accumulation_dtype(variable.dtype), []).append(index)
        self.dtypes = list(self._groups)
        self.sizes = [sum(self._lengths(dtype)) for dtype in self.dtypes]

    def _lengths(self, dtype: tf.DType) -> list[int]:
        """Elements of each variable of a type and of the zeros behind it, in turn."""
        unit = max(_ALIGNMENT_BYTES // dtype.size, 1)
        sizes = [int(np.prod(self._shapes[index], dtype=np.int64)) for index in self._groups[dtype]]
        return [length for size in sizes for length in (size, -size % unit)]

    def buffers(self) -> list[tf.Variable]:
        """Flat variables, filled with zeros, that nothing else keeps track of."""
        with tf.init_scope():
            return [
                tf.Variable(tf.zeros([size], dtype), trainable=False)
                for size, dtype in zip(self.sizes, self.dtypes, strict=True)
            ]

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The kinds of the flat tensors."""
        return [tf.TensorSpec((size,), dtype) for size, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def flatten(self, tensors: Sequence[tf.Tensor | tf.Variable]) -> list[tf.Tensor]:
        """Lay tensors flat, one of each variable's shape."""
        flats = []
        for dtype, group in self._groups.items():
            gaps = (tf.zeros([length], dtype) for length in self._lengths(dtype)[1::2])
            parts = (tf.cast(tf.reshape(tensors[index], [-1]), dtype) for index in group)
            flats.append(tf.concat([piece for both in zip(parts, gaps, strict=True) for piece in both], 0))
        return flats

    def split(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inverse of :meth:`flatten`."""
        parts: list[Any] = [None] * len(self._shapes)
        for flat, (dtype, group) in zip(flats, self._groups.items(), strict=True):
            for index, part in zip(group, tf.split(flat, self._lengths(dtype))[::2], strict=True):
                parts[index] = tf.reshape(part, self._shapes[index])
        return parts


def accumulation_dtype(dtype: tf.DType) -> tf.DType:
    """The type that sums of gradients of a type are kept in."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def native(variable: Any) -> tf.Variable:
    """TensorFlow's variable of a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def all_finite(flats: list[tf.Tensor]) -> tf.Tensor:
    """Whether every element is finite; traced.

    A sum is finite only if all its terms are, and costs one pass. Where it is not, it may have overflowed, so the
    terms are looked at one by one.
    """
    sums = tf.stack([tf.math.is_finite(tf.reduce_sum(flat)) for flat in flats])
    return tf.cond(
        tf.reduce_all(sums),
        lambda: tf.constant(True),
        lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(flat)) for flat in flats]),
    )


def all_finite_unless(known: tf.Tensor, flats: list[tf.Tensor]) -> tf.Tensor:
    """The same, not looked at where it is known; traced."""
    return tf.cond(known, lambda: tf.constant(True), lambda: all_finite(flats))


def bound(flats: list[tf.Tensor]) -> tf.Tensor:
    """A number that no element exceeds in magnitude, finite only if every element is, at one pass's cost; traced.

    It is the 2-norm, give or take rounding: infinite where that overflows. A float64 scalar.
    """
    total = tf.sqrt(2.0 * tf.add_n([tf.cast(tf.nn.l2_loss(flat), tf.float64) for flat in flats]))
    return tf.where(tf.math.is_nan(total), tf.constant(np.inf, tf.float64), total)


def norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The 2-norm of all elements together, a float64 scalar; traced."""
    return tf.sqrt(tf.add_n([tf.cast(tf.reduce_sum(tf.square(tensor)), tf.float64) for tensor in tensors]))


def add_scaled(variable: tf.Variable, tensor: tf.Tensor, factor: tf.Tensor) -> None:
    """Add ``factor`` times a tensor to a variable of its type: a step of gradient descent, in one pass over memory."""
    alpha = tf.cast(-factor, tensor.dtype)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=alpha, delta=tensor)


def compiled(function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """``function`` compiled once for arguments of these kinds, which saves finding out their kind at each call."""
    with tf.init_scope():
        return tf.function(function, autograph=False).get_concrete_function(*specs)


SCALAR = tf.TensorSpec((), tf.float64)
BOOLEAN = tf.TensorSpec((), tf.bool)


def digest_of(tensors: Sequence[tf.Tensor | tf.Variable]) -> int:
    """Fingerprint of the tensors' bits, below 2**48; computed where they are."""
    sums = _bit_sums([tf.convert_to_tensor(tensor) for tensor in tensors])
    return int.from_bytes(hashlib.blake2b(repr(sums.numpy().tolist()).encode(), digest_size=6).digest(), "big")


@tf.function(autograph=False)
def _bit_sums(tensors: list[tf.Tensor]) -> tf.Tensor:
    whole = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    sums = []
    for tensor in tensors:
        bits = tf.cast(tf.bitcast(tensor, whole[tensor.dtype.size]), tf.int64)
        sums += [tf.reduce_sum(bits), tf.reduce_sum(bits * bits)]
    return tf.stack(sums)
