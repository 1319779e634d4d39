"""The weighted mean of model updates: what :class:`horovod_abs.torch.ModelUpdates` exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compression

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.rounds import weight_for_updates
from horovod_abs.torch.exchanges import ModelUpdates
from horovod_abs.torch.flat import FlatBuffer, digest_of
from horovod_abs.torch.payloads import ExchangedSum, Options, learning_rates
from horovod_abs.torch.staleness import put_back
from horovod_abs.torch.wire import Wire


class UpdatePayload(ExchangedSum):
    """What a rank's own steps have changed since its round began.

    Three model-sized copies: the central model (the mean that all ranks share), the start (the model that the round
    started from), and the update, which is in flight and becomes the result in place. For parameters of half
    precision they are float32.

    At the boundary of a round, with the exchange before it merged into the central model::

        update = model − start        handed over, times this rank's weight
        model = start = central + update

    Args:
        optimizer, update, wire, name, options: See :class:`ExchangedSum`.
        exchange: What the user chose.

    Attributes:
        steps: Steps that this rank has taken.

    Raises:
        ValueError: ``average_state`` with compression.

    References:
        [NoDelay] Talyansky et al., ICLR 2019 submission, algorithms 1 and 2.
    """

    launches_first = False
    state_is_own = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], object],
        wire: Wire,
        name: str,
        exchange: ModelUpdates,
        options: Options,
    ) -> None:
        if exchange.average_state and options.compression is not Compression.none:
            raise ValueError(
                "average_state=True with compression: second moments are too small for float16. Leave one of them out"
            )
        self._exchange = exchange
        self.steps = 0
        super().__init__(optimizer, update, wire, name, options)

    def lay_out(self) -> None:
        super().lay_out()
        self._kinds = self._state_kinds() if self._exchange.average_state else []
        self._central = FlatBuffer(self.parameters)
        self._start = FlatBuffer(self.parameters)
        self._idle: FlatBuffer | None = FlatBuffer([*self.parameters, *(parameter for parameter, _ in self._kinds)])
        self._fresh = True
        self._has_mean_state = False
        self._outer = None
        if self._exchange.outer is not None:
            self._outer = self._exchange.outer(self._central.views)

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def accumulate(self, samples: float) -> None:
        """Take a step of the user's optimizer with the gradients in ``p.grad``, of ``samples`` samples.

        Raises:
            ValueError: a gradient of a parameter that was frozen when the optimizer was made.
        """
        self.refuse_thawed()
        self._take_start()
        for parameter in self.parameters:
            if parameter.grad is not None and self._options.sparse_as_dense:
                parameter.grad = parameter.grad.to_dense()
            if parameter.grad is not None and self._options.loss_reduction == "sum":
                parameter.grad.div_(samples)
        if self._options.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self._options.clip_grad_norm)
        factor = self._options.scaling.factor(self._wire.size, self.steps)
        with learning_rates(self._optimizer.param_groups, factor):
            self._update()
        for parameter in self.parameters:
            parameter.grad = None
        self.steps += 1

    @torch.no_grad()
    def _take_start(self) -> None:
        """The first round after a close starts from the model as it stands, whoever has set it meanwhile."""
        if self._fresh:
            torch._foreach_copy_(self._central.views, self.parameters)
            torch._foreach_copy_(self._start.views, self.parameters)
            self._fresh = False

    # -- the exchange ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Hand over what this rank's steps have changed, and go on from the central model with it."""
        self._take_start()
        buffer, self._idle = self._idle, None
        assert buffer is not None
        updates = buffer.views[: len(self.parameters)]
        weight = row[Column.WEIGHT] if self._exchange.weighting == "samples" else float(row[Column.WEIGHT] > 0)
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self._central.tensors)
        self._lay_progress(updates)
        self._hand_over_state(buffer.views[len(self.parameters) :])
        self._pack(row, np.zeros(0), buffer, weight)
        if row[Column.WEIGHT] > 0 and self._mine[Column.WEIGHT] == 0:
            self._heal_state()
        self._rebase(updates)
        self._in_background(_weigh, buffer, weight)
        expected = ledger.last_weight if self._exchange.weighting == "samples" else float(self._wire.size)
        self._send_in_background(buffer, weight_for_updates(expected))

    def _lay_progress(self, updates: list[torch.Tensor]) -> None:
        for parameter, start, update in zip(self.parameters, self._start.views, updates, strict=True):
            torch.sub(parameter, start, out=update)

    def _rebase(self, updates: list[torch.Tensor]) -> None:
        """Model and start become the central model plus the update."""
        for central, update, start in zip(self._central.views, updates, self._start.views, strict=True):
            torch.add(central, update, out=start)
        torch._foreach_copy_(self.parameters, self._start.views)
        if any(parameter.dtype != view.dtype for parameter, view in zip(self.parameters, updates, strict=True)):
            torch._foreach_copy_(self._start.views, self.parameters)  # half-precision parameters have rounded

    @torch.no_grad()
    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Move the central model by the mean update; False if it is not finite."""
        buffer, self._result = self._result, None
        assert buffer is not None
        self._idle = buffer
        if entry.weight == 0:
            return True
        if not self._is_finite(buffer):
            return False
        contributing = entry.column(Column.WEIGHT)
        total = entry.weight if self._exchange.weighting == "samples" else float((contributing > 0).sum())
        scale = 1.0 / (total * self._result_scale)
        updates, state = buffer.views[: len(self.parameters)], buffer.views[len(self.parameters) :]
        if state:
            torch._foreach_mul_(state, scale)
        if self._outer is None:
            torch._foreach_add_(self._central.views, updates, alpha=scale)
        else:
            self._step_outer(updates, scale)
        self._has_mean_state = True
        return True

    def _step_outer(self, updates: list[torch.Tensor], scale: float) -> None:
        assert self._outer is not None
        torch._foreach_mul_(updates, -scale)
        for central, update in zip(self._central.views, updates, strict=True):
            central.grad = update
        self._outer.step()
        for central in self._central.views:
            central.grad = None

    @torch.no_grad()
    def settle(self, closed: bool) -> None:
        """No launch follows the merge: go on from the central model with what has not been handed over yet."""
        assert self._idle is not None
        updates = self._idle.views[: len(self.parameters)]
        self._take_state(self._idle.views[len(self.parameters) :])
        if closed:
            torch._foreach_copy_(self.parameters, self._central.views)
            self._fresh = True
            return
        self._lay_progress(updates)
        self._rebase(updates)
        torch._foreach_sub_(self._start.views, updates)

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        """While inside, the parameters are those of the central model."""
        if self._fresh:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._central.views)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, own)

    def agree(self) -> None:
        """Take over rank 0's central model and outer optimizer's state; all ranks call it at the same merge."""
        kept = [] if self._outer is None else [self._outer.state[central] for central in self._central.views]
        state = [value for each in kept for _, value in sorted(each.items()) if isinstance(value, torch.Tensor)]
        self._wire.broadcast_([*self._central.tensors, *state], f"{self._name}.agree")

    # -- the user's optimizer's own state --------------------------------------------------------------------------

    def _state_kinds(self) -> list[tuple[torch.Tensor, str]]:
        """Which tensors the optimizer keeps for each parameter: found by a step that is undone at once."""
        kept = [parameter.detach().clone() for parameter in self.parameters]
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        with put_back(self._optimizer, self._device):
            self._update()
            found = [
                (parameter, name)
                for parameter in self.parameters
                for name, value in sorted(self._optimizer.state[parameter].items())
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
            ]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, kept)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return found

    def _hand_over_state(self, views: Sequence[torch.Tensor]) -> None:
        """Lay the state into the buffer; if that holds the mean of the round before, take that in its place."""
        for own, view in self._states(views):
            if own is None:
                view.zero_()
            elif self._has_mean_state:
                mean = view.clone()
                view.copy_(own)
                own.copy_(mean)
            else:
                view.copy_(own)
        self._has_mean_state = False

    def _take_state(self, views: Sequence[torch.Tensor]) -> None:
        for own, view in self._states(views):
            if own is not None and self._has_mean_state:
                own.copy_(view)
        self._has_mean_state = False

    def _states(self, views: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """What the optimizer keeps now, with its place in a buffer; ``None`` where it has kept nothing yet."""
        state = self._optimizer.state
        for (parameter, name), view in zip(self._kinds, views, strict=True):
            yield state[parameter].get(name) if parameter in state else None, view

    def _heal_state(self) -> None:
        """The update was not finite: neither, as a rule, is what the optimizer has kept. Begin that anew."""
        for kept in self._optimizer.state.values():
            tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
            if not all(bool(torch.isfinite(value).all()) for value in tensors):
                for value in tensors:  # also the count of steps, from which Adam corrects its moments' bias
                    value.zero_()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides the model and the user's optimizer."""
        return {"steps": self.steps, "outer": self._outer.state_dict() if self._outer is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.steps = int(state["steps"])
        if self._outer is not None and state["outer"] is not None:
            self._outer.load_state_dict(state["outer"])


def _weigh(buffer: FlatBuffer, weight: float) -> None:
    for flat in buffer.tensors:
        flat.mul_(weight) if weight else flat.zero_()
