"""What every exchange has in common: micro-batches handed over, flat tensors and a ledger summed without blocking."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from horovod_abs import rounds
from horovod_abs.core.ledger import Column, Flag, Floats
from horovod_abs.tensorflow.flat import Gradient, Layout, all_finite_unless, bound, native, norm
from horovod_abs.tensorflow.wire import Tensors, Wire

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Options(rounds.Options):
    """How things are accumulated, sent and applied; see ``DistributedOptimizer``."""

    compression: Any = Compression.none


class ExchangedSum:
    """Flat tensors and the ledger, on their way.

    A micro-batch is handed over inside the graph that has computed it, or eagerly; what follows is decided outside, in
    Python. Two small variables stand between: what was handed over since the last look, and how many samples the next
    micro-batch has, where it does not say so itself.

    Args:
        optimizer: The distributed optimizer.
        user_class: The class of the user's optimizer, whose ``apply`` updates parameters.
        wire: Sums over ranks.
        name: Prefix of the names under which tensors are exchanged, the same on every rank.
        options: See :class:`Options`.

    Attributes:
        parameters: The variables that are trained, in the optimizer's order; none before :meth:`lay_out`.
        samples: Samples in the next micro-batch, a float64 scalar.
        tracker: A metric that counts samples, if micro-batches are counted by it.
        state_is_own: Whether each rank's optimizer keeps a state of its own, unlike the others'.
        learning_rate_factor: By what the learning rate is multiplied in the step that is being taken.
    """

    state_is_own = False

    def __init__(self, optimizer: Any, user_class: type[Any], wire: Wire, name: str, options: Options) -> None:
        self._optimizer = optimizer
        self._user_class = user_class
        self._wire = wire
        self._name = name
        self._options = options
        self.parameters: list[tf.Variable] = []
        self.learning_rate_factor: tf.Tensor | None = None
        self.tracker: keras.metrics.Mean | None = None
        with tf.init_scope():
            self.samples = tf.Variable(np.nan, dtype=tf.float64, trainable=False)
            self._counted = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._pending = tf.Variable(tf.zeros([2], tf.float64), trainable=False)
            self._nothing = tf.zeros([2], tf.float64)

    def lay_out(self, variables: Sequence[Any]) -> None:
        """Take the variables that the optimizer was built with. Raises :class:`ValueError` if there are none."""
        if not variables:
            raise ValueError("the optimizer was built without variables to train")
        self.parameters = [native(variable) for variable in variables]
        self._index = {parameter.ref(): index for index, parameter in enumerate(self.parameters)}
        self._layout = Layout(self.parameters)
        self._eager: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._sums: Future[Tensors] | None = None
        self._result: Tensors | None = None
        self._scale = self._result_scale = 1.0
        self._sent = list(self._layout.dtypes)
        self._result_present = np.zeros(0, dtype=bool)
        self._result_bound = np.inf

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def hand_over(self, gradients: Sequence[Any], variables: Sequence[Any], samples: Any) -> None:
        """Take the gradients of one micro-batch, in a graph or eagerly.

        Args:
            gradients: Of each variable, or ``None``.
            variables: All or some of those that the optimizer was built with.
            samples: How many samples they are the mean of; ``None`` if :attr:`samples` or the tracker tells.

        Raises:
            ValueError: a sparse gradient without ``sparse_as_dense``, or an unknown variable.
        """
        ordered = self._ordered(gradients, variables)
        if not tf.executing_eagerly():
            self._hand_over(ordered, self._samples(samples))
            return
        present = tuple(gradient is not None for gradient in ordered)
        if present not in self._eager:
            self._eager[present] = tf.function(self._eagerly(present), autograph=False)
        count = tf.constant(samples, tf.float64) if samples is not None else self.samples.read_value()
        self._eager[present]([gradient for gradient in ordered if gradient is not None], count)

    def _eagerly(self, present: tuple[bool, ...]) -> Callable[[Tensors, tf.Tensor], None]:
        def hand_over(gradients: Tensors, samples: tf.Tensor) -> None:
            following = iter(gradients)
            self._hand_over([next(following) if here else None for here in present], samples)

        return hand_over

    def _hand_over(self, gradients: Sequence[Gradient], samples: tf.Tensor) -> None:
        tf.debugging.assert_equal(
            self._pending[0],
            tf.zeros([], tf.float64),
            "a micro-batch was handed over before the one before it was looked at: in a custom loop call "
            "optimizer.boundary() after each, outside tf.function; model.fit needs one of hvd.callbacks",
        )
        self._pending.assign_add(tf.stack([tf.ones([], tf.float64), samples]))
        self._take(gradients, samples)

    def _take(self, gradients: Sequence[Gradient], samples: tf.Tensor) -> None:
        """Do with the gradients of a micro-batch what the exchange does with them; traced."""
        raise NotImplementedError

    def _samples(self, given: Any) -> tf.Tensor:
        if given is not None:
            return tf.cast(given, tf.float64)
        if self.tracker is None:
            return self.samples.read_value()
        total = tf.cast(tf.convert_to_tensor(self.tracker.count), tf.float64)
        before = self._counted.read_value()
        self._counted.assign(total)
        return tf.where(total > before, total - before, total)  # it counts from 0 again in each epoch

    def _ordered(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Gradient]:
        ordered: list[Gradient] = [None] * len(self.parameters)
        for gradient, variable in zip(gradients, variables, strict=True):
            index = self._index.get(native(variable).ref())
            if index is None:
                raise ValueError(f"the optimizer was not built with the variable {variable.name}")
            ordered[index] = None if gradient is None else self._dense(gradient)
        return ordered

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._options.sparse_as_dense:
            raise ValueError("a gradient is sparse: pass sparse_as_dense=True to DistributedOptimizer")
        return tf.convert_to_tensor(gradient)

    def take_pending(self) -> tuple[int, float]:
        """Micro-batches handed over since the last look, and the samples in them."""
        handle = self._pending.handle  # the plain operations: it happens after each micro-batch
        micro_batches, samples = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy().tolist()
        if micro_batches:
            tf.raw_ops.AssignVariableOp(resource=handle, value=self._nothing)
        return int(micro_batches), samples

    def count_eagerly(self) -> float | None:
        """Samples in a micro-batch that was computed eagerly, by the tracker; ``None`` without one."""
        return None if self.tracker is None else float(self._samples(None))

    def count_anew(self) -> None:
        """The tracker counts from 0 again."""
        self._counted.assign(0.0)

    # -- the exchange ----------------------------------------------------------------------------------------------

    def _send(self, tensors: Tensors, row: Floats, present: tf.Tensor, weight: float, expected_weight: float) -> None:
        """Start to sum tensors, with the ledger; all that takes time happens in the submitting thread.

        Args:
            tensors: What is summed, times ``weight``, once it is laid flat.
            row: This rank's row.
            present: What this rank has something for, a float64 vector.
            weight: What the tensors are multiplied by.
            expected_weight: About the sum of all ranks' weights.
        """
        self._scale = 1.0 / self._options.gradient_predivide_factor
        if self._options.compression is not Compression.none:
            self._scale /= 2.0 ** round(np.log2(expected_weight or rounds.FIRST_EXPECTED_WEIGHT))
        given = [*tensors, tf.constant(row), present, tf.constant(weight * self._scale, tf.float64)]
        self._sums = self._wire.start_sum(given, self._name, self._pack)

    def _pack(self, given: Tensors) -> Tensors:
        """What travels: the tensors, scaled and compressed, and the ledger with this rank's row in it; traced.

        Tensors that are not finite are dropped by selection: zeros in their place, and weight 0.
        """
        *tensors, row, present, scale = given
        flats = self._flatten(tensors)
        empty = tf.equal(row[Column.WEIGHT], 0.0)
        largest = tf.where(empty, tf.zeros([], tf.float64), bound(flats))
        kept = all_finite_unless(tf.math.is_finite(largest), flats)
        if self._scales:
            flats = [flat * tf.cast(scale, flat.dtype) for flat in flats]
        flats = tf.cond(
            kept, lambda: [tf.identity(flat) for flat in flats], lambda: [tf.zeros_like(flat) for flat in flats]
        )
        dropped = np.zeros(len(Column))
        dropped[Column.FLAGS] = float(Flag.NONFINITE)
        weightless = np.ones(len(Column))
        weightless[Column.WEIGHT] = 0.0
        row = tf.where(kept, row, row * weightless + dropped)
        others = [tf.zeros([len(Column) * ranks], tf.float64) for ranks in (self._wire.rank, self._ranks_after)]
        kept = tf.cast(kept, tf.float64)
        largest = tf.math.multiply_no_nan(largest * scale * self._options.gradient_predivide_factor, kept)
        ledger = tf.concat([others[0], row, others[1], present * kept, [largest]], 0)
        return [*(self._options.compression.compress(flat)[0] for flat in flats), ledger]

    def _flatten(self, tensors: Tensors) -> Tensors:
        """Lay what is handed over flat, unless it is; traced."""
        return tensors

    def _surely_finite(self) -> bool:
        """Whether the sum must be finite, because the ranks' bounds cannot add up to an overflow."""
        uncompressed = self._options.compression is Compression.none
        return uncompressed and rounds.cannot_overflow(self._result_bound, self._result_scale)

    @property
    def _scales(self) -> bool:
        """Whether tensors are multiplied by anything before they travel."""
        return self._options.compression is not Compression.none or self._options.gradient_predivide_factor != 1.0

    @property
    def _ranks_after(self) -> int:
        return self._wire.size - self._wire.rank - 1

    def poll(self) -> bool:
        """Whether the exchange in flight is complete."""
        return self._sums is not None and self._sums.done()

    def read(self) -> Floats:
        """Take over the completed sums; the rows of all ranks, shape ``(ranks, len(Column))``."""
        assert self._sums is not None
        *flats, ledger = self._wire.finish(self._sums)
        self._sums = None
        self._result_scale = self._scale
        self._result = [
            self._options.compression.decompress(flat, dtype) for flat, dtype in zip(flats, self._sent, strict=True)
        ]
        values = ledger.numpy()
        ranks = self._wire.size * len(Column)
        self._result_present, self._result_bound = values[ranks:-1] > 0, float(values[-1])
        return np.array(values[:ranks].reshape(self._wire.size, len(Column)))

    def options(self) -> int:
        """Fingerprint of the optimizer's hyper-parameters, below 2**48."""
        plain = [(key, value) for key, value in vars(self._optimizer).items() if type(value) in _PLAIN]
        given = sorted(item for item in plain if item[0] != "name" and not item[0].startswith("_"))
        text = repr((self._rate(), given))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    def _rate(self) -> Any:
        """The learning rate, or what a schedule of it was made of."""
        rate = self._optimizer._learning_rate
        if isinstance(rate, keras.Variable):
            return tf.raw_ops.ReadVariableOp(resource=rate.value.handle, dtype=rate.value.dtype).numpy().item()
        return rate.get_config() if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None

    # -- the user's optimizer --------------------------------------------------------------------------------------

    def _update(self, gradients: Sequence[Gradient], factor: tf.Tensor) -> None:
        """Take a step of the user's optimizer, with its learning rate times ``factor``; traced."""
        here = [(g, p) for g, p in zip(gradients, self.parameters, strict=True) if g is not None]
        if not here:
            return
        self.learning_rate_factor = None if self._options.scaling.rule == "none" else factor
        try:
            self._user_class.apply(self._optimizer, [tf.cast(g, p.dtype) for g, p in here], [p for _, p in here])
        finally:
            self.learning_rate_factor = None

    def _clipped(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """No longer together than ``clip_grad_norm``; traced."""
        longest, here = self._options.clip_grad_norm, [g for g in gradients if g is not None]
        if longest is None or not here:
            return gradients
        scale = tf.minimum(tf.ones([], tf.float64), longest / (norm(here) + 1e-6))
        return [None if g is None else g * tf.cast(scale, g.dtype) for g in gradients]

    def _state(self) -> list[tf.Variable]:
        """All that the user's optimizer keeps: moments, the count of steps, the learning rate."""
        return [native(variable) for variable in self._optimizer.variables]
