"""What examples for TensorFlow and Keras take as given; made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow.keras as hvd
from tests.documentation.examples import SAMPLES


class Stage:
    """Names and what they stand for."""

    epochs = 2
    tf = tf
    keras = keras
    hvd: Any = hvd
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @staticmethod
    def accuracy(model: keras.Model, x: Any, y: Any) -> float:
        return float(np.mean(np.argmax(model(x), axis=1) == y))

    @property
    def callbacks(self) -> list[Any]:
        return []

    @cached_property
    def x(self) -> Any:
        return np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)

    @cached_property
    def y(self) -> Any:
        return self.x[:, :3].argmax(axis=1)

    @property
    def images(self) -> Any:
        return self.x

    @property
    def labels(self) -> Any:
        return self.y

    @cached_property
    def model(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])

    @cached_property
    def optimizer(self) -> Any:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        optimizer.build(self.model.trainable_variables)
        return optimizer

    @cached_property
    def data(self) -> tf.data.Dataset:
        """For a model that is compiled."""
        self.model.compile(self.optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return hvd.adaptive_dataset(self.x, self.y, optimizer=self.optimizer, batch_size=4)

    @property
    def dataset(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((self.x, self.y)).batch(4)

    @cached_property
    def train_step(self) -> Callable[..., None]:
        model, optimizer = self.model, self.optimizer

        @tf.function
        def train_step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return train_step


def record(path: Path) -> None:
    """Leave the log of a run of one epoch; every rank calls it."""
    stage = Stage()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), record=path)
    stage.model.compile(optimizer, "sparse_categorical_crossentropy")
    data = hvd.adaptive_dataset(stage.x, stage.y, optimizer=optimizer, batch_size=4)
    stage.model.fit(data, callbacks=hvd.callbacks.wrap([]), verbose=0)
    hvd.average(0.0)  # the file is complete before anyone goes on
