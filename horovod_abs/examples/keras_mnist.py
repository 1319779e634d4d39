"""A small CNN on MNIST with ``model.fit``, on ranks of different speed.

    horovodrun -np 4 python -m horovod_abs.examples.keras_mnist --speeds 1,1,0.5,0.25

``train`` shows what changes in a Keras script. The speeds are emulated: each rank's real compute is stretched by
sleeping. On a cluster that really is mixed pass ``--no-emulation``. ``tf_mnist`` is the same in a loop of one's own,
and compares with plain Horovod, whose own Keras optimizer averages nothing under Keras 3.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

import horovod_abs.tensorflow.keras as hvd
from horovod_abs.examples import mnist_keras
from horovod_abs.examples.arguments import PLAIN, parse
from horovod_abs.examples.mnist_keras import Images
from horovod_abs.examples.tf_mnist import Score, score
from horovod_abs.examples.trial import Batches
from horovod_abs.observe.summary import Summary, summarise


def train(args: argparse.Namespace, model: keras.Model, train_set: Images, trial: Score) -> tuple[Summary, Batches]:
    """ABS-SGD: every rank computes as many micro-batches as it can until the next exchange can start."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(args.lr, args.momentum), exchange=args.exchange, clock=args.clock, record=args.record
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    optimizer.build(model.trainable_variables)
    data = hvd.adaptive_dataset(*train_set, optimizer=optimizer, batch_size=args.micro_batch, seed=args.seed)
    callbacks: list[keras.callbacks.Callback] = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Keeper(trial),
    ]
    first = 0
    if args.checkpoint_dir:
        checkpoints = hvd.Checkpointer(args.checkpoint_dir, model, optimizer)
        checkpoints.restore()
        first = checkpoints.epoch
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: checkpoints.save()))

    trial.wait_for_all()
    model.fit(data, initial_epoch=first, epochs=args.epochs, callbacks=callbacks, shuffle=False, verbose=0)

    summary = summarise(optimizer.history, trial.watch.seconds, ideal=trial.ideal)
    return summary, [record.samples for record in optimizer.history]


class Keeper(keras.callbacks.Callback):
    """Keeps the score, and stretches each step to the emulated time."""

    def __init__(self, trial: Score) -> None:
        super().__init__()
        self._trial = trial
        self._epoch, self._step = ExitStack(), ExitStack()

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self._trial.bar.watch(optimizer)

        @optimizer.on_merge
        def keep() -> None:
            if self._trial.is_due():
                with optimizer.authoritative():
                    self._trial.keep(self.model, optimizer.samples_seen)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trial.bar.epoch = epoch + 1
        self._epoch.enter_context(self._trial.watch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step.enter_context(self._trial.compute())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step.close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch.close()
        if logs:
            self.model.optimizer.log(**{name: float(value) for name, value in logs.items()})
        if self._trial.is_over():
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._trial.bar.close()


def main() -> None:
    """Train as the command line says; rank 0 reports."""
    args = parse(__doc__)
    if args.algorithm == PLAIN:
        raise SystemExit(
            "Horovod's own Keras optimizer averages nothing under Keras 3: for plain Horovod run "
            "horovod_abs.examples.tf_mnist"
        )
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    keras.utils.set_random_seed(args.seed)
    train_set, test_set = mnist_keras.load(seed=args.seed)
    trial = score(args, len(train_set[0]))
    model = mnist_keras.small_cnn()
    summary, batches = train(args, model, train_set, trial)
    trial.finish(model, summary, batches, lambda weights: mnist_keras.accuracy(weights, test_set))


if __name__ == "__main__":
    main()
