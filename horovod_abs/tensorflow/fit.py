"""Rounds under ``model.fit``, where Keras has the loop and a callback decides between its steps.

Keras computes and hands a micro-batch over inside its compiled step. Before it asks for the next batch it tells its
callbacks; that is where a rank looks after its exchange, and where the next batch of an adaptive data set is put ready.
An epoch ends there too, by ``StopIteration``, with all ranks at the same exchange and nothing pending.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_abs.rounds import Rounds, rounds_of
from horovod_abs.tensorflow.flat import native
from horovod_abs.tensorflow.functions import average_buffers
from horovod_abs.tensorflow.sampler import AdaptiveSampler, adaptive_sampler_of

METRICS_WITH_SUMS = (
    keras.metrics.Mean,
    keras.metrics.Sum,
    keras.metrics.AUC,
    keras.metrics.Precision,
    keras.metrics.Recall,
    keras.metrics.TruePositives,
    keras.metrics.TrueNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.FBetaScore,
    keras.metrics.IoU,
    keras.metrics.R2Score,
)
"""Metrics whose variables are sums over samples, so that the sums over ranks are those of all samples."""


class FitLoop:
    """One rank's rounds in one call of ``model.fit``.

    Args:
        model: That is trained, with a distributed optimizer.
        data: The adaptive data set that it is trained with, if the user has named it.

    Raises:
        ValueError: something that cannot work with rounds: its message says what to do.
    """

    def __init__(self, model: keras.Model, data: Any = None) -> None:
        refuse_unsupported(model)
        self._model = model
        self._rounds: Rounds = rounds_of(model.optimizer)
        self._sampler = sampler_for(model.optimizer, data)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._stream: Iterator[tuple[int, Future[Any]]] | None = None
        self._computing = False
        self._open = False
        if type(model).train_step is keras.Model.train_step:  # others say by themselves how many samples there are
            self._rounds.payload.tracker = loss_tracker(model)

    # -- one epoch -------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """An epoch begins; Keras has set its metrics back."""
        self._open = True
        self._rounds.payload.count_anew()
        if self._sampler is not None:
            self._stream = self._sampler.loaded()
        self._rounds.timer.start()

    def before_batch(self) -> None:
        """Look after the micro-batch that Keras has computed, and let it have another one.

        Raises:
            StopIteration: the epoch has ended, on all ranks.
        """
        self._after_batch()
        if self._stream is not None and self._sampler is not None:
            following = next(self._stream, None)
            if following is None:
                self.end_epoch()
                raise StopIteration
            samples, batch = following
            self._rounds.payload.samples.assign(float(samples))
            self._sampler.feed(batch)
        self._computing = True
        self._rounds.timer.start()

    def _after_batch(self) -> None:
        """Keras may also have found that there is no more data."""
        if not self._computing:
            return
        self._computing = False
        seconds = self._rounds.timer.stop()
        micro_batches, samples = self._rounds.payload.take_pending()
        if micro_batches == 0:
            return
        if micro_batches > 1 or not (samples > 0 and math.isfinite(samples)):
            raise RuntimeError(
                f"a step of model.fit has handed over {micro_batches} micro-batches with {samples:g} samples. A "
                "train_step of one's own must call optimizer.apply_gradients once, with samples= unless the data are "
                "an adaptive_dataset"
            )
        self._rounds.driver.micro_batch_done(samples, seconds)

    def end_epoch(self) -> None:
        """Close on all ranks, whether the epoch is over or Keras has left it early; once in each epoch."""
        if not self._open:
            return
        self._open = False
        self._after_batch()
        stream, self._stream = self._stream, None
        if stream is None:
            self._rounds.driver.close()
        else:
            stream.close()  # type: ignore[attr-defined]
        if self._sampler is not None:
            self._sampler.stop_feeding()
        average_buffers(self._model, self._model.optimizer)
        stops = self._rounds.gather([int(self._model.stop_training or self._rounds.driver.engine.stopped)], "stop")
        self._model.stop_training = any(row[0] for row in stops)

    def end(self) -> None:
        """Keras has left the loop, or is about to begin another one."""
        self.end_epoch()
        self._rounds.payload.tracker = None

    # -- metrics ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """The model's metrics over the samples of all ranks; every rank calls it. This rank's own are left alone."""
        variables = [native(variable) for metric in metrics_of(self._model) for variable in metric.variables]
        kept = [variable.numpy() for variable in variables]
        flat = np.concatenate([np.ravel(value).astype(np.float64) for value in kept])
        name = f"{self._rounds.name}.metrics"
        (sums,) = self._rounds.wire.finish(self._rounds.wire.start_sum([tf.constant(flat)], name))
        parts = np.split(sums.numpy(), np.cumsum([value.size for value in kept])[:-1])
        for variable, value, part in zip(variables, kept, parts, strict=True):
            variable.assign(part.reshape(value.shape).astype(value.dtype))
        results = {name: np.asarray(value) for name, value in self._model.get_metrics_result().items()}
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        return {name: float(value) if value.ndim == 0 else value for name, value in results.items()}


def sampler_for(optimizer: Any, data: Any) -> AdaptiveSampler | None:
    """The sampler of the adaptive data set that ``fit`` reads.

    Args:
        optimizer: The distributed optimizer.
        data: The data set if the user has named it.

    Raises:
        ValueError: several were made for the optimizer, and none is named.
    """
    if data is not None:
        named = adaptive_sampler_of(data)
        if named is None:
            raise ValueError("data= must be what hvd.adaptive_dataset has returned, without what follows it")
        return named
    samplers = rounds_of(optimizer).samplers
    if len(samplers) > 1:
        raise ValueError(
            "several adaptive_datasets were made for the optimizer: name the one that fit reads, with "
            "hvd.callbacks.wrap([...], data=…)"
        )
    return samplers[0] if samplers else None


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The metric by which Keras's ``train_step`` counts the samples of each batch."""
    found = next((metric for metric in model.metrics if metric.name == "loss"), None)
    if not isinstance(found, keras.metrics.Mean):
        raise ValueError("the model has no metric 'loss' that counts samples: call compile() before fit()")
    return found


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """All metrics of a compiled model, those that were handed to ``compile`` included."""
    found: list[keras.Metric] = []
    for metric in model.metrics:
        found.extend(metric.metrics if hasattr(metric, "metrics") else [metric])
    return found


def refuse_unsupported(model: keras.Model) -> None:
    """Raise :class:`ValueError` for what does not go together with rounds, naming the alternative."""
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "mixed_float16 puts a LossScaleOptimizer around the optimizer, which skips steps by gradients that only "
            "this rank sees: use mixed_bfloat16"
        )
    if "_rounds" not in vars(model.optimizer):
        raise ValueError(
            "the model's optimizer is not distributed: compile it with hvd.DistributedOptimizer(…), and a model that "
            "was loaded with hvd.load_model"
        )
    if model.steps_per_execution > 1:
        raise ValueError(
            "steps_per_execution > 1 leaves no moment between micro-batches at which a round could end: leave it at 1"
        )
    if tf.distribute.has_strategy() or model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError("Horovod runs one process for each device: leave the tf.distribute strategy out")


def refuse_inexact_metrics(model: keras.Model) -> None:
    """Raise :class:`ValueError` for a metric of which the ranks' values cannot be brought together."""
    for metric in metrics_of(model):
        if not isinstance(metric, METRICS_WITH_SUMS):
            raise ValueError(
                f"the metric {metric.name!r} ({type(metric).__name__}) cannot be averaged over ranks exactly: use one "
                "whose state is a sum over samples, or evaluate it apart"
            )


def expect_early_ends() -> None:
    """Keras warns of an epoch that ends early as of data that have run out; here it is how epochs end."""
    warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)
