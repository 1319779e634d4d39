"""The weighted mean of gradients: what :class:`horovod_abs.torch.Gradients` exchanges."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.torch.exchanges import Gradients
from horovod_abs.torch.flat import FlatBuffer, digest_of
from horovod_abs.torch.payloads import ExchangedSum, Options, learning_rates
from horovod_abs.torch.staleness import AsPublished, Lookahead, Taylor
from horovod_abs.torch.wire import Wire


class GradientPayload(ExchangedSum):
    """Sums of per-sample gradients, and the number of samples.

    Two flat buffers take turns, so that one accumulates while the other is in flight: one buffer more than autograd
    needs for itself. On CPU a thread adds the gradients up and sends the sum while the next micro-batch is already
    being computed; on CUDA the device does that by itself.

    Args:
        optimizer, update, wire, name, options: See :class:`ExchangedSum`.
        exchange: What the user chose.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], object],
        wire: Wire,
        name: str,
        exchange: Gradients,
        options: Options,
    ) -> None:
        self._exchange = exchange
        super().__init__(optimizer, update, wire, name, options)

    def lay_out(self) -> None:
        super().lay_out()
        self._accumulator: FlatBuffer | None = None
        self._free: list[FlatBuffer] = []
        self._present = np.zeros(len(self.parameters))
        self._staleness = self._make_staleness()

    def _make_staleness(self) -> AsPublished:
        if self._exchange.staleness == "taylor":
            return Taylor(self.parameters, self._exchange.taylor_lambda)
        if self._exchange.staleness == "lookahead":
            return Lookahead(self.parameters, self._optimizer)
        return AsPublished()

    @property
    def launches_first(self) -> bool:
        """Whether the next exchange may start before the result of the last one is applied."""
        return self._staleness.launches_first

    def authoritative(self) -> AbstractContextManager[None]:
        """While inside, the parameters are those that all ranks share."""
        return self._staleness.authoritative()

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def accumulate(self, samples: float) -> None:
        """Add the gradients in ``p.grad``, of ``samples`` samples, and clear them.

        Raises:
            ValueError: a sparse gradient without ``sparse_as_dense``, or a gradient of a parameter that was frozen
                when the optimizer was made.
        """
        self.refuse_thawed()
        found = {index: self._strided(p.grad) for index, p in enumerate(self.parameters) if p.grad is not None}
        for index in found:
            self._present[index] = 1.0
            self.parameters[index].grad = None
        if not found:
            return
        weight = samples if self._options.loss_reduction == "mean" else 1.0
        self._finish_jobs()  # at most one micro-batch's gradients wait to be added up
        self._in_background(self._accumulating().add_, found, weight)

    def _accumulating(self) -> FlatBuffer:
        if self._accumulator is None:
            self._accumulator = self._free.pop() if self._free else FlatBuffer(self.parameters)
        return self._accumulator

    def _strided(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is torch.strided:
            return grad
        if not self._options.sparse_as_dense:
            raise ValueError("a gradient is sparse: pass sparse_as_dense=True to DistributedOptimizer")
        return grad.to_dense()

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Start to sum the accumulator and the ledger over all ranks."""
        buffer, self._accumulator = self._accumulating(), None
        present, self._present = self._present, np.zeros(len(self.parameters))
        if self._result is None:
            self._staleness.begin()
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self.parameters)
        self._in_background(self._pack_sum, row, present, buffer)
        if not self.launches_first:
            self._finish_jobs()
            self._predict(buffer, ledger)
        self._send_in_background(buffer, ledger.last_weight)

    def _pack_sum(self, row: Floats, present: Floats, buffer: FlatBuffer) -> None:
        buffer.recall()
        self._pack(row, present, buffer)

    def _predict(self, buffer: FlatBuffer, ledger: Ledger) -> None:
        """Let a staleness remedy look ahead with this rank's own mean gradient."""
        weight = float(self._mine[Column.WEIGHT])
        if weight == 0:
            return
        present = self._ledger[self._wire.size * len(Column) : -1].tolist()
        scale = self._clipped(buffer, 1.0 / weight)
        factor = self._options.scaling.factor(ledger.last_weight or weight, float(ledger.weight.sum()))

        def gradients() -> list[torch.Tensor | None]:
            pairs = zip(self.parameters, buffer.views, present, strict=True)
            return [(view * scale).to(parameter.dtype) if here else None for parameter, view, here in pairs]

        with learning_rates(self._optimizer.param_groups, factor):
            self._staleness.predict(gradients, self._update)

    # -- the update ------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Take one step of the user's optimizer with the mean gradient; False if it is not finite.

        A parameter that has no gradient on any rank keeps ``p.grad = None``, as in a single process.
        """
        buffer, self._result = self._result, None
        assert buffer is not None
        finite = entry.weight == 0 or self._is_finite(buffer)
        if entry.weight and finite:
            self._step(buffer, entry.weight, self._options.scaling.factor(entry.weight, samples_before))
        else:
            self._staleness.before_update([None] * len(self.parameters))
        buffer.forget()
        self._free.append(buffer)
        return finite

    def _step(self, buffer: FlatBuffer, weight: float, learning_rate_factor: float) -> None:
        scale = self._clipped(buffer, 1.0 / (weight * self._result_scale))
        for flat in buffer.tensors:
            flat.mul_(scale)
        pairs = zip(buffer.views, self._result_present, strict=True)
        gradients = [view if present else None for view, present in pairs]
        self._staleness.before_update(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        with learning_rates(self._optimizer.param_groups, learning_rate_factor):
            self._update()
        for parameter in self.parameters:
            parameter.grad = None

    def _clipped(self, buffer: FlatBuffer, scale: float) -> float:
        """The factor that makes a sum a mean, smaller where the mean would be longer than ``clip_grad_norm``."""
        if self._options.clip_grad_norm is None:
            return scale
        return scale * min(1.0, self._options.clip_grad_norm / (buffer.norm() * scale + 1e-6))

    def agree(self) -> None:
        """Take over parameters and optimizer state of rank 0; all ranks call it at the same merge."""
        state = self._optimizer.state
        kept = [value for p in self.parameters if p in state for _, value in sorted(state[p].items())]
        tensors = [*self.parameters, *(value for value in kept if isinstance(value, torch.Tensor))]
        self._wire.broadcast_([tensor.data for tensor in tensors], f"{self._name}.agree")

    def settle(self, closed: bool) -> None:
        """No launch follows the merge: there is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides the model and the user's optimizer: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
