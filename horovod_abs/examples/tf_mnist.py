"""A small CNN on MNIST in a loop of one's own, on ranks of different speed, with ABS-SGD or with plain Horovod.

    horovodrun -np 4 python -m horovod_abs.examples.tf_mnist --speeds 1,1,0.5,0.25
    horovodrun -np 4 python -m horovod_abs.examples.tf_mnist --speeds 1,1,0.5,0.25 --algorithm ssgd

``train_abs`` and ``train_plain`` show what changes in a Horovod script. The speeds are emulated: each rank's real
compute is stretched by sleeping. On a cluster that really is mixed pass ``--no-emulation``. ``keras_mnist`` is the same
with ``model.fit``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import horovod.tensorflow as plain_horovod
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import horovod_abs.tensorflow as hvd
from horovod_abs.examples import mnist_keras
from horovod_abs.examples.arguments import PLAIN, parse
from horovod_abs.examples.mnist_keras import Images
from horovod_abs.examples.trial import Batches, Trial
from horovod_abs.observe.summary import Summary, summarise, summarise_totals
from horovod_abs.tensorflow.replay import ReplayTask

Score = Trial[keras.Model, list[NDArray[np.float32]]]
BATCH = (tf.TensorSpec((None, 28, 28, 1), tf.float32), tf.TensorSpec((None,), tf.int64))
"""What a micro-batch looks like: the last one of an epoch is smaller, and is not to be traced anew."""
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_abs(args: argparse.Namespace, model: keras.Model, train_set: Images, trial: Score) -> tuple[Summary, Batches]:
    """ABS-SGD: every rank computes as many micro-batches as it can until the next exchange can start."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(args.lr, args.momentum), exchange=args.exchange, clock=args.clock, record=args.record
    )
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    batches = hvd.adaptive_dataset(*train_set, optimizer=optimizer, batch_size=args.micro_batch, seed=args.seed)
    checkpoints = hvd.Checkpointer(args.checkpoint_dir, model, optimizer) if args.checkpoint_dir else None
    if checkpoints:
        checkpoints.restore()

    @tf.function(input_signature=BATCH)
    def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @optimizer.on_merge
    def keep() -> None:
        if trial.is_due():
            with optimizer.authoritative():
                trial.keep(model, optimizer.samples_seen)

    trial.bar.watch(optimizer)
    train.get_concrete_function()  # compiled before the clock starts
    loss: tf.Tensor | None = None  # a rank may come away with no batch at all
    for _ in trial.epochs():
        with trial.watch:
            for images, labels in optimizer.epoch(batches):
                with trial.compute():
                    loss = train(images, labels)
                optimizer.boundary()
        if loss is not None:
            optimizer.log(loss=float(loss))
        if checkpoints:
            checkpoints.save()
        if optimizer.stopped or optimizer.samples_seen >= args.epochs * len(train_set[0]):
            break

    summary = summarise(optimizer.history, trial.watch.seconds, ideal=trial.ideal)
    return summary, [record.samples for record in optimizer.history]


def train_plain(
    args: argparse.Namespace, model: keras.Model, train_set: Images, trial: Score
) -> tuple[Summary, Batches]:
    """Plain synchronous Horovod: equal micro-batches, and everybody waits for the slowest.

    It does what Horovod's ``DistributedGradientTape`` does, for under Keras 3 Horovod's optimizer averages nothing. The
    averages are taken apart from the gradients, so that only computing is stretched to the emulated time.
    """
    optimizer = keras.optimizers.SGD(args.lr, args.momentum)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function(input_signature=BATCH)
    def compute(images: tf.Tensor, labels: tf.Tensor) -> Sequence[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def update(gradients: Sequence[tf.Tensor]) -> None:
        averages = plain_horovod.grouped_allreduce(gradients, op=plain_horovod.Average)
        optimizer.apply_gradients(zip(averages, model.trainable_variables, strict=True))

    compute.get_concrete_function()  # compiled before the clock starts
    update.get_concrete_function([tf.TensorSpec(each.shape, each.dtype) for each in model.trainable_variables])
    batches: Batches = []
    own = len(train_set[0]) // hvd.size()

    for epoch in trial.epochs():
        order = np.random.default_rng([args.seed, epoch]).permutation(len(train_set[0]))
        mine = order[hvd.rank() :: hvd.size()][:own]
        with trial.watch:
            for first in range(0, own, args.micro_batch):
                images, labels = (part[mine[first : first + args.micro_batch]] for part in train_set)
                before = trial.computing.seconds
                with trial.compute():
                    gradients = compute(images, labels)
                update(gradients)
                batches.append((float(len(images)),) * hvd.size())
                trial.bar.advance(sum(batches[-1]), trial.computing.seconds - before)
                if trial.is_due():
                    trial.keep(model, sum(map(sum, batches)))

    compute_seconds = hvd.allgather(tf.constant([trial.computing.seconds], tf.float64)).numpy().tolist()
    samples = [sum(by_rank) for by_rank in zip(*batches, strict=True)]
    seconds = trial.watch.seconds
    return summarise_totals(samples, compute_seconds, seconds, rounds=len(batches), ideal=trial.ideal), batches


ALGORITHMS = {"abs": train_abs, PLAIN: train_plain}


def score(args: argparse.Namespace, epoch_samples: int) -> Score:
    """What keeps the score on this rank."""
    return Trial(
        args,
        rank=hvd.rank(),
        size=hvd.size(),
        epoch_samples=epoch_samples,
        copy=lambda model: model.get_weights(),
        greatest=lambda value: float(hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Max, name="greatest")),
    )


def main() -> None:
    """Train as the command line says; rank 0 reports."""
    args = parse(__doc__)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    keras.utils.set_random_seed(args.seed)
    train_set, test_set = mnist_keras.load(seed=args.seed)
    trial = score(args, len(train_set[0]))
    model = mnist_keras.small_cnn()
    summary, batches = ALGORITHMS[args.algorithm](args, model, train_set, trial)
    trial.finish(model, summary, batches, lambda weights: mnist_keras.accuracy(weights, test_set))


def replay_task() -> ReplayTask:
    """What ``horovod-abs replay`` needs of a run with the default learning rate and seed, ``keras_mnist``'s too."""
    return ReplayTask(
        model=mnist_keras.small_cnn(),
        optimizer=keras.optimizers.SGD(0.1),
        dataset=mnist_keras.load(seed=0)[0],
        loss=lambda model, batch: loss_of(batch[1], model(batch[0], training=True)),
    )


if __name__ == "__main__":
    main()
