"""``DistributedOptimizer``: the user's optimizer, stepping once a round instead of after every backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from horovod_abs.core.clocks import Clock, SyncClock
from horovod_abs.core.scaling import Rule
from horovod_abs.epochs import epoch_batches
from horovod_abs.errors import ExchangeFailed
from horovod_abs.exchanges import Exchange, Gradients, ModelUpdates
from horovod_abs.rounds import Identity, Rounds, RoundsMixin, open_rounds, rounds_of, scaling_for
from horovod_abs.tensorflow import checks
from horovod_abs.tensorflow.data import count_samples, epoch_length
from horovod_abs.tensorflow.gradients import GradientPayload
from horovod_abs.tensorflow.payloads import Options
from horovod_abs.tensorflow.record import open_recorder
from horovod_abs.tensorflow.sampler import adaptive_sampler_of
from horovod_abs.tensorflow.updates import UpdatePayload
from horovod_abs.tensorflow.wire import open_wire
from horovod_abs.timing import HostTimer


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    exchange: Exchange | None = None,
    clock: Clock | None = None,
    loss_reduction: str = "mean",
    lr_scaling: Rule = "none",
    reference_batch_size: float | None = None,
    warmup_samples: float = 0,
    warmup_steps: int = 0,
    clip_grad_norm: float | None = None,
    min_micro_batches: int = 1,
    max_micro_batches: int = 64,
    exchange_timeout: float = 60.0,
    digest_every: int = 100,
    record: str | Path | None = None,
) -> Any:
    """Make an optimizer that computes on while gradients are exchanged, and lets every rank do as much as it can.

    The result is an instance of the class of ``optimizer`` and of :class:`DistributedOptimizerMixin`; state that
    ``optimizer`` already has is kept. Call it on every rank, after ``hvd.init()``. Then

    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    >>> model.compile(optimizer, "sparse_categorical_crossentropy")
    >>> data = hvd.adaptive_dataset(x, y, optimizer=optimizer, batch_size=16)
    >>> history = model.fit(data, verbose=0, callbacks=hvd.callbacks.wrap([]))

    or in a loop of one's own

    >>> @tf.function
    ... def train(x, y):
    ...     with tf.GradientTape() as tape:
    ...         loss = loss_fn(y, model(x, training=True))
    ...     gradients = tape.gradient(loss, model.trainable_variables)
    ...     optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    >>> for images, labels in optimizer.epoch(data):
    ...     train(images, labels)
    ...     merged = optimizer.boundary()

    Args:
        optimizer: The optimizer to wrap, e.g. ``keras.optimizers.SGD(0.1)``.
        name: A name for the optimizer; its own by default.
        device_dense, device_sparse: Must be empty; the exchange runs where the model is.
        compression: ``hvd.Compression.none`` or ``.fp16``; applied to what is averaged, on the wire, never to counts.
        sparse_as_dense: Convert ``IndexedSlices`` to dense gradients instead of refusing them.
        gradient_predivide_factor: The sum is divided by this before the exchange and multiplied by it afterwards.
        op: Must be ``hvd.Average``.
        backward_passes_per_step: Must be 1; see ``CountClock``.
        average_aggregated_gradients: Has no effect where ``backward_passes_per_step`` is 1, in Horovod neither.
        num_groups: Must be 0; gradients travel as one group.
        groups: Must be ``None``.
        process_set: The ranks that train together. A rank outside steps by itself.
        scale_local_gradients: Has no effect, as no gradient is local.
        exchange: What is averaged: :class:`Gradients` (the default) or :class:`ModelUpdates`.
        clock: When a round ends; :class:`SyncClock` by default.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of a micro-batch, ``"sum"`` if it is their
            sum.
        lr_scaling: ``"none"``, ``"linear"`` or ``"sqrt"``: learning rate against the global batch (``ModelUpdates``:
            against the number of ranks).
        reference_batch_size: The global batch, in samples, that the learning rate was tuned for.
        warmup_samples: Samples over which the scaling is phased in.
        warmup_steps: For ``ModelUpdates``: a rank's own steps over which the scaling is phased in.
        clip_grad_norm: Greatest 2-norm of the *global* gradient (``ModelUpdates``: of a micro-batch's own).
        min_micro_batches: Micro-batches that a rank does at least in a round.
        max_micro_batches: Micro-batches after which a rank waits for the exchange.
        exchange_timeout: Seconds without progress after which a waiting rank gives up, naming the missing ones.
        digest_every: Rounds between two comparisons of the ranks' parameters; where they have drifted apart, as on
            unlike processors, all take over those of the first rank.
        record: A file, for this optimizer alone, in which the first rank writes the run down, so that it can be
            watched and repeated; see :mod:`horovod_abs.observe.runlog`. A file that exists is appended to.
            Whenever all ranks close, at the end of an epoch, the parameters are saved beside it.

    Raises:
        ValueError: an option that is out of range, or would not keep its meaning here.
        Mismatch: the ranks were given different models, options or clocks; found when the optimizer is built.

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164.
    """
    exchange, clock = exchange or Gradients(), clock or SyncClock()
    checks.refuse_unsupported(
        optimizer,
        exchange,
        {
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "num_groups": num_groups,
            "groups": groups,
        },
    )
    if device_dense or device_sparse:
        raise ValueError("device_dense= and device_sparse= cannot be chosen here: the exchange runs where the model is")
    options = Options(
        scaling=scaling_for(exchange, lr_scaling, reference_batch_size, warmup_samples, warmup_steps),
        compression=compression,
        clip_grad_norm=clip_grad_norm,
        loss_reduction=loss_reduction,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        digest_every=digest_every,
    )
    user_class, wire, identity = type(optimizer), open_wire(process_set, exchange_timeout), Identity.next(process_set)
    self = _of_both_classes(optimizer)
    if name is not None:
        self.name = name
    payload: GradientPayload | UpdatePayload
    if isinstance(exchange, ModelUpdates):
        payload = UpdatePayload(self, user_class, wire, identity.name, exchange, options)
    else:
        payload = GradientPayload(self, user_class, wire, identity.name, exchange, options)
    rounds = open_rounds(
        identity,
        payload,
        wire,
        process_set,
        user_class=user_class,
        timer=HostTimer(),
        exchange=exchange,
        clock=clock,
        options=options,
        min_micro_batches=min_micro_batches,
        max_micro_batches=max_micro_batches,
        exchange_timeout=exchange_timeout,
    )
    vars(self)["_rounds"] = rounds  # past Keras, which would keep track of what is in it
    if record is not None and wire.rank == 0 and process_set.included():
        described = asdict(options.named())
        described.update(min_micro_batches=min_micro_batches, max_micro_batches=max_micro_batches)
        rounds.driver.log = open_recorder(record, rounds.driver, self, payload, exchange, clock, described)
    if self.built:
        self._begin(self._trainable_variables)
    return self


class DistributedOptimizerMixin(RoundsMixin):
    """What an optimizer made by :func:`DistributedOptimizer` can do besides what its own class can."""

    _rounds: Rounds
    _iterations: Any
    _trainable_variables: list[Any]
    built: bool

    # -- the training loop -----------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], samples: Any = None) -> Any:
        """Add the gradients of one micro-batch to the round.

        Called eagerly it goes on to :meth:`boundary`, and merges if an exchange is complete and the round ends. Inside
        a ``tf.function`` it only adds: call ``boundary()`` outside, after each.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            samples: Divisor of the loss: the number of samples in the micro-batch, a number or a scalar tensor. May be
                left out inside ``epoch`` and ``model.fit``.

        Returns:
            The count of updates, as Keras does.

        Raises:
            ValueError: a number of samples that is missing or negative; a sparse gradient.
            ExchangeTimeout, ExchangeFailed, Mismatch: the exchange did not work out; names rank, cause and remedy.
        """
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables, samples)
        return self._iterations

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, samples: Any = None
    ) -> None:
        """The same, of gradients and variables apart; see :meth:`apply_gradients`."""
        rounds = rounds_of(self)
        if not self.built:
            if trainable_variables is None:
                raise ValueError("give the variables with the first gradients, or call optimizer.build(variables)")
            self.build(list(trainable_variables))
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        if not tf.executing_eagerly():
            rounds.payload.hand_over(grads, variables, samples)
            return
        seconds = rounds.timer.stop()
        if samples is None:
            samples = rounds.payload.count_eagerly() if rounds.driver.batch_size is None else rounds.driver.batch_size
        samples = None if samples is None else float(samples)
        if samples is None:
            raise ValueError("apply_gradients() needs samples=, the number of samples that the loss was averaged over")
        if not (samples >= 0 and math.isfinite(samples)):
            raise ValueError(f"samples must not be negative or infinite, got {samples!r}")
        self._refuse_failed()
        if samples:
            rounds.payload.hand_over(grads, variables, samples)
            rounds.payload.take_pending()
        rounds.driver.micro_batch_done(float(samples), seconds)
        rounds.timer.start()

    def boundary(self) -> bool:
        """After a micro-batch that was handed over inside a ``tf.function``: merge and launch if it is time to.

        Returns:
            Whether a merge happened in this call.

        Raises:
            RuntimeError: not exactly one micro-batch was handed over since the last call.
            ValueError: its number of samples is not known, negative or infinite.
            ExchangeTimeout, ExchangeFailed, Mismatch: the exchange did not work out; names rank, cause and remedy.
        """
        rounds = rounds_of(self)
        seconds = rounds.timer.stop()
        self._refuse_failed()
        micro_batches, samples = rounds.payload.take_pending()
        if micro_batches != 1:
            raise RuntimeError(
                f"boundary() after {micro_batches} micro-batches: call it once after each that apply_gradients() has "
                "handed over inside a tf.function"
            )
        if not (samples >= 0 and math.isfinite(samples)):
            raise ValueError(
                "the micro-batch's number of samples is not known, negative or infinite: pass samples= to "
                f"apply_gradients(), or take batches from optimizer.epoch() (got {samples!r})"
            )
        merged = rounds.driver.micro_batch_done(samples, seconds)
        rounds.timer.start()
        return merged

    def epoch(
        self, batches: Iterable[Any], *, samples_per_epoch: float | None = None, rounds: int | None = None
    ) -> Iterator[Any]:
        """Go through ``batches`` until the epoch ends, on all ranks at the same exchange.

        With an :func:`adaptive_dataset` every sample of it is drawn exactly once, by whichever rank has time for it.
        Anything else is begun again as often as needed, and the epoch ends when all ranks together have drawn
        ``samples_per_epoch``.

        All ranks call it; leaving it by ``break`` or an exception ends the epoch on all ranks. Nothing is pending
        afterwards.

        Args:
            batches: This rank's batches, e.g. a ``tf.data.Dataset``.
            samples_per_epoch: The epoch ends when all ranks together have drawn this many.
            rounds: The epoch ends after so many rounds instead.

        Raises:
            ValueError: no length is given, or one that an ``adaptive_dataset`` has already.
            Mismatch: the ranks' data sets differ.
        """
        state = rounds_of(self)
        state.close_epoch_before()
        sampler = adaptive_sampler_of(batches)
        if sampler is not None:
            if samples_per_epoch is not None or rounds is not None:
                raise ValueError(
                    "an epoch of an adaptive_dataset ends by itself: leave samples_per_epoch= and rounds= out"
                )
            own = sampler.batches()
        else:
            drawn = epoch_length(samples_per_epoch, rounds)
            own = state.driver.epoch(
                epoch_batches(batches), count_samples, drawn=drawn, rounds=math.inf if rounds is None else rounds
            )
        return state.timed(self._announced(own))

    def _announced(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Let graphs know how many samples the next micro-batch has."""
        rounds, known = rounds_of(self), None
        for batch in batches:
            if rounds.driver.batch_size != known:
                known = rounds.driver.batch_size
                rounds.payload.samples.assign(float(known or 0))
            yield batch
        rounds.payload.samples.assign(math.nan)

    # -- what Keras calls ------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's state for some variables; all ranks do so at the same point.

        Raises:
            Mismatch: another rank has other variables or other options.
            ValueError: no variables, or a LossScaleOptimizer around this optimizer.
        """
        checks.refuse_loss_scaling(self)
        built = self.built
        super().build(variables)  # type: ignore[misc]
        if not built:
            self._begin(variables)

    def _begin(self, variables: Sequence[Any]) -> None:
        rounds = rounds_of(self)
        with tf.init_scope():  # it may be called while a graph is being traced
            rounds.payload.lay_out(variables)
            rounds.check_same(checks.describe_variables(rounds.payload.parameters))

    @property
    def learning_rate(self) -> Any:
        """The learning rate; while a step is taken, times what ``lr_scaling`` says."""
        rate = rounds_of(self).user_class.learning_rate.fget(self)
        factor = rounds_of(self).payload.learning_rate_factor
        return rate if factor is None else rate * tf.cast(factor, rate.dtype)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        rounds_of(self).user_class.learning_rate.fset(self, value)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Keras calls it at the end of ``fit``.

        Raises:
            RuntimeError: something was handed over and nobody has looked after it.
        """
        rounds = rounds_of(self)
        if rounds.payload.parameters and rounds.payload.take_pending()[0]:
            raise RuntimeError(
                "model.fit has trained nothing: it needs one of hvd.callbacks, e.g. hvd.callbacks.wrap([])"
            )
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a distributed optimizer cannot be copied: make a plain optimizer from get_config(), and wrap that"
        )

    def _refuse_failed(self) -> None:
        driver = rounds_of(self).driver
        if driver.failed:
            raise ExchangeFailed(driver.rank, "an exchange has failed before", "Start the run again")


def _of_both_classes(optimizer: Any) -> Any:
    """An object with the state of ``optimizer`` that is an instance of its class and of ours.

    With the module of the user's class Keras saves it as the plain optimizer that it can be loaded as.
    """
    user_class = type(optimizer)
    namespace = {"__module__": user_class.__module__, "__doc__": DistributedOptimizerMixin.__doc__}
    cls = type(user_class.__name__, (DistributedOptimizerMixin, user_class), namespace)
    result: Any = object.__new__(cls)
    vars(result).update(vars(optimizer))
    return result
