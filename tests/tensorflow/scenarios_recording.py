"""Runs that are recorded, stopped, resumed and repeated, in a loop of one's own and under ``model.fit``."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow.keras as hvd
from tests.tensorflow.replay import Regression, adam, sgd
from tests.tensorflow.scenario import Naps, Ranks, digest, flat, scenario, small_model, wrap


@contextmanager
def folder_of(ranks: Ranks) -> Iterator[Path]:
    """A folder that all ranks share."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(ranks.gather(own)[0])
        ranks.gather(None)


@contextmanager
def _signals_put_back() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _forgetful_model(seed: int = 0) -> keras.Model:
    """A network that also depends on the random numbers of its rank, and keeps statistics of what it has seen."""
    keras.utils.set_random_seed(seed)
    dropout = keras.layers.Dropout(0.2, seed=100 * seed + hvd.rank())
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), dropout, keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


@dataclass
class Training:
    """A model, its optimizer and an adaptive data set.

    Attributes:
        seen: Indices of the samples that this rank has stepped on.
    """

    ranks: Ranks
    options: dict[str, Any]
    model: keras.Model = field(default_factory=small_model)
    make: Callable[[], Any] = sgd
    naps: int = 0
    task: Regression = field(default_factory=lambda: Regression(240))
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = wrap(self.make(), **self.options)
        self.optimizer.build(self.model.trainable_variables)
        self.data = hvd.adaptive_dataset(np.arange(240), optimizer=self.optimizer, batch_size=7, seed=3)
        self.nap = Naps(1000 * self.naps + self.ranks.rank)
        self._micro_batch = tf.function(self._compute, reduce_retracing=True)

    def _compute(self, indices: Any) -> None:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.model(tf.gather(self.task.x, indices), training=True)
            reduce = tf.reduce_sum if self.options.get("loss_reduction") == "sum" else tf.reduce_mean
            loss = reduce((outputs - tf.gather(self.task.y, indices)) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def epoch(self, between: Callable[[int], object] = lambda number: None) -> None:
        """One epoch, or the rest of one; ``between`` is called in the middle of each micro-batch's work."""
        for number, indices in enumerate(self.optimizer.epoch(self.data)):
            self._micro_batch(indices)
            self.nap()
            between(number)
            self.optimizer.boundary()
            self.seen += indices.numpy().tolist()

    def assert_each_sample(self, times: int, before: list[list[int]] | None = None) -> None:
        """All ranks together have seen each sample so often; every rank must call it."""
        everyone = [*self.ranks.gather(self.seen), *(before or [])]
        counts = np.bincount([index for own in everyone for index in own], minlength=240)
        assert counts.tolist() == [times] * 240, counts


@scenario(gloo=True)
def recorded_and_repeated(ranks: Ranks) -> None:
    """On the same ranks at other speeds the same bits; the log can be looked at."""
    from typer.testing import CliRunner

    from horovod_abs.cli import app

    with folder_of(ranks) as folder:
        path = folder / "run.jsonl"
        options = {"exchange": hvd.Gradients(staleness="lookahead"), "clip_grad_norm": 0.7}
        first = Training(ranks, {**options, "record": path})
        for epoch in range(2):
            first.epoch()
            first.optimizer.log(loss=float(epoch))
        first.assert_each_sample(2)
        ranks.gather(None)
        log = hvd.read_run_log(path)
        assert [r.round for r in log.history] == list(range(len(first.optimizer.history)))
        assert [r.samples for r in log.history] == [r.samples for r in first.optimizer.history]
        assert [event.values for event in log.events] == [{"loss": 0}, {"loss": 1}]
        second = Training(ranks, {**options, "clock": hvd.ReplayClock(log.entries)}, naps=1)
        for _ in range(2):
            second.epoch()
        assert second.seen == first.seen
        assert digest(second.model) == digest(first.model)
        ranks.assert_same(digest(first.model), "parameters")
        if ranks.rank == 0:
            for command, output in (("timeline", folder / "trace.json"), ("plot", folder / "run.png")):
                outcome = CliRunner().invoke(app, [command, str(path), "-o", str(output)])
                assert outcome.exit_code == 0, outcome.output
                assert output.stat().st_size > 1000


@scenario
def stopped_resumed_and_repeated(ranks: Ranks) -> None:
    """SIGTERM on one rank ends all with a checkpoint; resumed, the run has the bits of one that was never stopped."""
    _stop_resume_and_repeat(ranks, hvd.Gradients(staleness="lookahead"))


@scenario
def updates_stopped_resumed_and_repeated(ranks: Ranks) -> None:
    """The same, with an optimizer's state of each rank's own."""
    _stop_resume_and_repeat(ranks, hvd.ModelUpdates())


def _stop_resume_and_repeat(ranks: Ranks, exchange: Any) -> None:
    with folder_of(ranks) as folder, _signals_put_back():
        path, checkpoints = folder / "run.jsonl", folder / "kept"

        def terminate(number: int) -> None:
            if number == 3 and ranks.rank == ranks.size - 2:
                os.kill(os.getpid(), signal.SIGTERM)

        first = Training(ranks, {"exchange": exchange, "record": path}, _forgetful_model(), adam)
        stopped = hvd.Checkpointer(checkpoints, first.model, first.optimizer)
        assert not stopped.restore()
        first.epoch(terminate)
        assert first.optimizer.stopped
        stopped.save()  # there is one already
        assert list(first.optimizer.epoch(first.data)) == []
        before = ranks.gather(first.seen)
        assert 0 < sum(map(len, before)) < 240, "it was to be stopped in the middle"
        assert [file.name for file in checkpoints.iterdir()] == [f"checkpoint-{len(first.optimizer.history):09d}"]

        resumed = Training(ranks, {"exchange": exchange, "record": path}, _forgetful_model(1), adam, naps=1)
        keeper = hvd.Checkpointer(checkpoints, resumed.model, resumed.optimizer)
        assert keeper.restore()
        assert digest(resumed.model) == digest(first.model)
        resumed.epoch()
        resumed.assert_each_sample(1, before)
        assert keeper.epoch == 1
        keeper.save()
        ranks.assert_same(digest(resumed.model), "parameters")

        clock = hvd.ReplayClock(hvd.read_run_log(path).entries)
        whole = Training(ranks, {"exchange": exchange, "clock": clock}, _forgetful_model(), adam, naps=2)
        whole.epoch()
        assert whole.seen == first.seen + resumed.seen
        assert digest(whole.model) == digest(resumed.model)


@scenario
def checkpoints_in_plain_keras(ranks: Ranks) -> None:
    """SIGUSR1 takes a checkpoint in mid-epoch; the last few are kept; plain Keras loads what was saved."""
    with folder_of(ranks) as folder, _signals_put_back():
        training = Training(ranks, {"clock": hvd.CountClock(2)}, _forgetful_model(), adam)
        keeper = hvd.Checkpointer(folder / "kept", training.model, training.optimizer, keep=2)

        def ask(number: int) -> None:
            if number == 2 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

        training.epoch(ask)
        training.assert_each_sample(1)
        middle = keeper.latest()
        assert middle is not None
        assert 0 < int(middle.name.split("-")[1]) < len(training.optimizer.history), "it was to be taken in the middle"
        last = keeper.save()
        training.epoch()
        assert keeper.save() != last
        statistics = [variable.numpy().tolist() for variable in training.model.layers[1].non_trainable_variables]
        ranks.assert_same(statistics, "statistics")
        if ranks.rank > 0:
            return
        paths = sorted((folder / "kept").iterdir())
        assert paths == [last, keeper.latest()]
        plain, optimizer = _forgetful_model(1), adam()
        optimizer.build(plain.trainable_variables)
        found = tf.train.Checkpoint(model=plain, optimizer=optimizer).read(str(paths[-1] / "variables"))
        found.assert_existing_objects_matched()
        assert digest(plain) == digest(training.model)
        for one, other in zip(optimizer.variables, training.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


@scenario
def fit_stopped_and_resumed(ranks: Ranks) -> None:
    """SIGTERM ends ``fit`` on all ranks with a checkpoint; the next run takes the rest of the epoch."""
    x = np.random.default_rng(3).standard_normal((240, 6))
    x[:, 0] = np.arange(240)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    class Draws(keras.Model):
        def train_step(self, data: Any) -> Any:
            tf.py_function(lambda column: drawn.extend(column.numpy().tolist()), [data[0][:, 0]], [])
            return super().train_step(data)

    drawn: list[float] = []
    with folder_of(ranks) as folder, _signals_put_back():
        for stops in (True, False):
            keras.utils.set_random_seed(int(stops))
            inputs = keras.Input((6,))
            model = Draws(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(inputs[:, 1:])))
            model.compile(wrap(keras.optimizers.SGD(0.02, momentum=0.5)), "mse")
            data = hvd.adaptive_dataset(x, x[:, 1:2], optimizer=model.optimizer, batch_size=4)
            checkpoints = hvd.Checkpointer(folder / "kept", model, model.optimizer)
            assert checkpoints.restore() != stops
            assert checkpoints.epoch == 0
            save = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_, keeper=checkpoints: keeper.save())
            callbacks = hvd.callbacks.wrap([save, *([Stop()] if stops else [])])
            history = model.fit(data, initial_epoch=checkpoints.epoch, epochs=2, verbose=0, callbacks=callbacks)
            ranks.assert_same((digest(model), history.history), "parameters and logs")
            assert model.optimizer.stopped == stops
            assert history.epoch == ([0] if stops else [0, 1])
            if stops:
                assert sum(ranks.gather(len(drawn))) < 240
        counts = np.bincount([int(index) for own in ranks.gather(drawn) for index in own], minlength=240)
        assert counts.tolist() == [2] * 240, counts
        if ranks.rank == 0:
            model.save(folder / "model.keras")
            loaded = keras.saving.load_model(folder / "model.keras", custom_objects={"Draws": Draws})
            np.testing.assert_array_equal(flat(loaded), flat(model))
            assert type(loaded.optimizer) is keras.optimizers.SGD
            for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
                np.testing.assert_array_equal(one.numpy(), other.numpy())


@scenario
def averages(ranks: Ranks) -> None:
    """Means over ranks, by weight; a rank with weight 0 does not count, not even with NaN."""
    value = float("nan") if ranks.rank == 0 else float(ranks.rank)
    weights = np.arange(ranks.size, dtype=float)
    expected = float((weights * weights).sum() / weights.sum())
    assert hvd.average(value, ranks.rank, name="value") == expected
    np.testing.assert_allclose(
        hvd.average(tf.fill([2, 3], value), ranks.rank, name="tensor"), np.full((2, 3), expected)
    )
    batches = [np.full(ranks.rank, 2.0 * ranks.rank)] if ranks.rank else []
    assert hvd.evaluate(lambda batch: {"x": batch.mean()}, batches) == {"x": 2 * expected}
