"""One contiguous tensor in place of many: what is added up and sent in one piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Gradient = Any
"""A tensor, or ``None``."""


class Layout:
    """Where the elements of each of some variables lie in flat tensors, one for each dtype.

    Sums of half-precision gradients are kept in float32 (design rule 8).

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
            self._groups.setdefault(_accumulation_dtype(variable.dtype), []).append(index)
        self.dtypes = list(self._groups)
        self.sizes = [sum(self._size(index) for index in group) for group in self._groups.values()]

    def _size(self, index: int) -> int:
        return int(np.prod(self._shapes[index], dtype=np.int64))

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

    def flatten(self, tensors: Sequence[Gradient]) -> list[tf.Tensor]:
        """Lay tensors flat, one of each variable's shape; zeros in the place of ``None``."""
        return [
            tf.concat([self._flat(index, tensors[index], dtype) for index in group], 0)
            for dtype, group in self._groups.items()
        ]

    def _flat(self, index: int, tensor: Gradient, dtype: tf.DType) -> tf.Tensor:
        if tensor is None:
            return tf.zeros([self._size(index)], dtype)
        return tf.cast(tf.reshape(tensor, [-1]), dtype)

    def split(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inverse of :meth:`flatten`."""
        parts: list[Any] = [None] * len(self._shapes)
        for flat, group in zip(flats, self._groups.values(), strict=True):
            for index, part in zip(group, tf.split(flat, [self._size(index) for index in group]), strict=True):
                parts[index] = tf.reshape(part, self._shapes[index])
        return parts


def _accumulation_dtype(dtype: tf.DType) -> tf.DType:
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


def norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The 2-norm of all elements together, a float64 scalar; traced."""
    return tf.sqrt(tf.add_n([tf.cast(tf.reduce_sum(tf.square(tensor)), tf.float64) for tensor in tensors]))


def compiled(function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """``function`` compiled once for arguments of these kinds, which saves finding out their kind at each call."""
    with tf.init_scope():
        return tf.function(function, autograph=False).get_concrete_function(*specs)


SCALAR = tf.TensorSpec((), tf.float64)


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
