"""Checkpoints from which a run goes on as if it had not been stopped."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from horovod_abs.checkpoints import Checkpoints
from horovod_abs.tensorflow.flat import native
from horovod_abs.tensorflow.functions import average_buffers, gather_objects, is_random

_VARIABLES = "variables"
_SIDECAR = "state.pkl"


class Checkpointer(Checkpoints):
    """Writes checkpoints of model, optimizer, ledger, data set and random numbers, and finds the last one again.

    >>> checkpoints = hvd.Checkpointer("runs/mnist", model, optimizer)
    >>> found = checkpoints.restore()
    >>> save = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: checkpoints.save())
    >>> history = model.fit(
    ...     data, initial_epoch=checkpoints.epoch, epochs=epochs, verbose=0, callbacks=hvd.callbacks.wrap([save])
    ... )

    SIGTERM on any rank ends the run on all ranks, with a checkpoint, and SIGUSR1 takes one in mid-epoch: both are
    flags in the ledger, acted upon at the merge that shows them. Rank 0 writes, to a folder of another name that is
    then renamed, so that no half-written checkpoint is ever found. In the folder,
    ``tf.train.Checkpoint(model=model, optimizer=optimizer).read(folder / "variables")`` finds the variables without
    this package; what else a run needs lies beside them. With ``ModelUpdates`` that holds the state of every rank's
    own optimizer (momentum, moments). Random numbers are those of NumPy, Python and the model's own layers
    (``Dropout``), not those of ``tf.random``'s operations.

    Args:
        directory: Where checkpoints are written, by rank 0, and read, by rank 0.
        model: The model, built, the same on every rank.
        optimizer: Made by ``DistributedOptimizer``.
        keep: Checkpoints to keep; older ones are removed.
        signals: Whether to handle SIGTERM and SIGUSR1.

    Raises:
        ValueError: ``keep`` is less than 1, or the model is not built.
    """

    def __init__(
        self, directory: str | Path, model: keras.Model, optimizer: Any, *, keep: int = 3, signals: bool = True
    ) -> None:
        self._model = model
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(directory, optimizer, keep=keep, signals=signals)

    @property
    def epoch(self) -> int:
        """Whole passes over the ``adaptive_dataset`` that are done: Keras's ``initial_epoch``."""
        samplers = self._rounds.samplers
        return samplers[0].epoch if samplers else 0

    def _collect(self) -> dict[str, Any]:
        average_buffers(self._model, self._optimizer)
        own = [native(variable).numpy() for variable in self._optimizer.variables]
        optimizers = self._gather(own) if self._rounds.payload.state_is_own else None
        return {"rounds": self._rounds.state_dict(), "optimizers": optimizers}

    def _store(self, state: dict[str, Any], path: Path) -> None:
        path.mkdir()
        self._variables().write(str(path / _VARIABLES))
        with (path / _SIDECAR).open("wb") as file:
            pickle.dump(state, file)
        for each in path.iterdir():
            with each.open("rb") as file:
                os.fsync(file.fileno())

    def _read(self, path: Path) -> dict[str, Any]:
        self._variables().read(str(path / _VARIABLES)).assert_existing_objects_matched()
        state: dict[str, Any] = pickle.loads((path / _SIDECAR).read_bytes())  # trusted as the run's own
        return state

    def _load(self, state: dict[str, Any]) -> None:
        everything = [*self._model.variables, *self._optimizer.variables]
        variables = list({native(variable).ref(): native(variable) for variable in everything}.values())
        values = self._rounds.wire.broadcast([v.read_value() for v in variables], f"{self._rounds.name}.restore")
        if state["optimizers"]:
            variables = [*variables, *(native(variable) for variable in self._optimizer.variables)]
            values = [*values, *state["optimizers"][self._rounds.wire.rank]]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self._rounds.load_state_dict(state["rounds"])

    def _variables(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model=self._model, optimizer=self._optimizer)

    def _gather(self, thing: Any) -> list[Any]:
        if self._rounds.wire.size == 1:
            return [thing]
        return gather_objects(thing, "horovod_abs.checkpoint", self._rounds.process_set)

    def _random_state(self) -> dict[str, Any]:
        return {**super()._random_state(), "keras": [native(v).numpy() for v in self._generators()]}

    def _set_random_state(self, state: dict[str, Any]) -> None:
        super()._set_random_state(state)
        for variable, value in zip(self._generators(), state["keras"], strict=True):
            variable.assign(value)

    def _generators(self) -> list[Any]:
        return [variable for variable in self._model.variables if is_random(variable)]
