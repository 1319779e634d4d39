"""The tensors that are exchanged: flat accumulators, and how their sum becomes an update of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compression

from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.core.scaling import Scaling
from horovod_abs.torch.exchanges import Gradients
from horovod_abs.torch.staleness import AsPublished, Lookahead, Taylor
from horovod_abs.torch.wire import Wire

FIRST_EXPECTED_WEIGHT = 1024.0
"""About how many samples the first sum is taken to hold, before there is a ledger that says so."""


class FlatBuffer:
    """One contiguous tensor for each dtype, with a view for each parameter.

    Sums of half-precision gradients are kept in float32 (design rule 8).

    Args:
        parameters: The parameters whose gradients it holds, all on one device.

    Attributes:
        tensors: The flat tensors, one for each dtype.
        views: A view of the shape of each parameter, in the order of ``parameters``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(parameters):
            by_dtype.setdefault(_accumulation_dtype(parameter), []).append(index)
        self.tensors: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        for dtype, indices in by_dtype.items():
            sizes = [parameters[index].numel() for index in indices]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[indices[0]].device)
            self.tensors.append(flat)
            for index, part in zip(indices, torch.split(flat, sizes), strict=True):
                self.views[index] = part.view(parameters[index].shape)

    def zero_(self) -> None:
        """Set all to zero."""
        for flat in self.tensors:
            flat.zero_()

    def all_finite(self) -> torch.Tensor:
        """Whether every element is finite: a boolean tensor without dimensions, on the buffer's device.

        A sum is finite only if all its terms are, and costs one pass. Where it is not, it may have overflowed, so
        the terms are looked at one by one.
        """
        finite = torch.stack([torch.isfinite(flat.sum()) for flat in self.tensors]).all()
        if finite.device.type == "cpu" and not finite:
            return torch.stack([torch.isfinite(flat).all() for flat in self.tensors]).all()
        return finite

    def norm(self) -> float:
        """The 2-norm of all elements together."""
        norms = [torch.linalg.vector_norm(flat).to(torch.float64) for flat in self.tensors]
        return float(torch.linalg.vector_norm(torch.stack(norms)))


def _accumulation_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are accumulated, sent and applied; see ``DistributedOptimizer``."""

    scaling: Scaling
    compression: Any = Compression.none
    clip_grad_norm: float | None = None
    loss_reduction: str = "mean"
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    digest_every: int = 100


class GradientPayload:
    """The weighted mean of gradients: sums of per-sample gradients, and the number of samples.

    Two flat buffers take turns, so that one accumulates while the other is in flight: one buffer more than autograd
    needs for itself. Written for CUDA as well, where the decision on non-finite values stays on the device and
    travels as a tensor; tested on CPU only.

    Args:
        optimizer: The optimizer whose ``param_groups`` are read.
        update: Takes one step of the user's optimizer from ``p.grad``.
        wire: Sums over ranks.
        name: Prefix of the names under which tensors are exchanged, the same on every rank.
        exchange: What the user chose.
        options: See :class:`GradientOptions`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], object],
        wire: Wire,
        name: str,
        exchange: Gradients,
        options: GradientOptions,
    ) -> None:
        self._optimizer = optimizer
        self._update = update
        self._wire = wire
        self._name = name
        self._exchange = exchange
        self._options = options
        self._handle: int | None = None
        self.parameters: list[torch.Tensor] = []
        self.lay_out()

    def lay_out(self) -> None:
        """Make buffers for the parameters that the optimizer has now. Only while nothing is pending."""
        everything = [p for group in self._optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in everything if p.requires_grad]
        self._frozen = [p for p in everything if not p.requires_grad]
        if not self.parameters:
            raise ValueError("the optimizer has no parameter that requires a gradient")
        self._device = self.parameters[0].device
        if any(p.device != self._device for p in self.parameters):
            raise ValueError(
                "the optimizer's parameters are on several devices: put the model on the one device of this rank"
            )
        self._accumulator: FlatBuffer | None = None
        self._in_flight: FlatBuffer | None = None
        self._result: FlatBuffer | None = None
        self._free: list[FlatBuffer] = []
        self._compressed: list[tuple[torch.Tensor, Any]] = []
        self._present = np.zeros(len(self.parameters))
        self._ledger = torch.zeros(0, dtype=torch.float64)
        self._scale = 1.0
        self.staleness = self._make_staleness()

    def _make_staleness(self) -> AsPublished:
        if self._exchange.staleness == "taylor":
            return Taylor(self.parameters, self._exchange.taylor_lambda)
        if self._exchange.staleness == "lookahead":
            return Lookahead(self.parameters, self._optimizer)
        return AsPublished()

    @property
    def launches_first(self) -> bool:
        """Whether the next exchange may start before the result of the last one is applied."""
        return self.staleness.launches_first

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def accumulate(self, samples: float) -> None:
        """Add the gradients in ``p.grad``, of ``samples`` samples, and clear them.

        Raises:
            ValueError: a sparse gradient without ``sparse_as_dense``, or a gradient of a parameter that was frozen
                when the optimizer was made.
        """
        if any(p.grad is not None for p in self._frozen):
            raise ValueError(
                "a parameter that was frozen when DistributedOptimizer was made has a gradient now: make the "
                "optimizer after unfreezing it, or add it with add_param_group after synchronize()"
            )
        buffer = self._accumulating()
        views, grads = [], []
        for index, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is not None:
                views.append(buffer.views[index])
                grads.append(grad if grad.layout is torch.strided else self._dense(grad))
                self._present[index] = 1.0
                parameter.grad = None
        if grads:
            weight = samples if self._options.loss_reduction == "mean" else 1.0
            torch._foreach_add_(views, grads, alpha=weight)

    def _accumulating(self) -> FlatBuffer:
        if self._accumulator is None:
            self._accumulator = self._free.pop() if self._free else FlatBuffer(self.parameters)
        return self._accumulator

    def _dense(self, grad: torch.Tensor) -> torch.Tensor:
        if not self._options.sparse_as_dense:
            raise ValueError("a gradient is sparse: pass sparse_as_dense=True to DistributedOptimizer")
        return grad.to_dense()

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Start to sum the accumulator and the ledger over all ranks."""
        buffer, self._accumulator = self._accumulating(), None
        if self._result is None:
            self.staleness.begin()
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self.parameters)
        self._pack(row, buffer)
        self._predict(buffer, ledger)
        self._scale_for_wire(buffer, ledger.last_weight)
        self._compressed = [self._options.compression.compress(flat) for flat in buffer.tensors]
        sent = [tensor for tensor, _ in self._compressed]
        self._handle = self._wire.sum_([*sent, self._ledger], self._name)
        self._in_flight = buffer

    def _pack(self, row: Floats, buffer: FlatBuffer) -> None:
        """Lay this rank's row, and which parameters have a gradient, into the tensor that is summed with the others.

        A sum that is not finite is dropped by selection: it is set to zero, and its weight too.
        """
        mine = torch.from_numpy(np.concatenate([row, self._present])).to(self._device)
        self._present[:] = 0.0
        if row[Column.WEIGHT] > 0:
            finite = buffer.all_finite()
            dropped = mine.clone()
            dropped[[Column.WEIGHT, *range(len(Column), len(mine))]] = 0.0
            dropped[Column.FLAGS] += float(Flag.NONFINITE)
            mine = torch.where(finite, mine, dropped)
            if self._device.type != "cpu":
                for flat in buffer.tensors:
                    flat.masked_fill_(~finite, 0.0)
            elif not finite:
                buffer.zero_()
        columns, ranks = len(Column), self._wire.size * len(Column)
        self._ledger = torch.zeros(ranks + len(mine) - columns, dtype=torch.float64, device=self._device)
        self._mine = self._ledger[self._wire.rank * columns :][:columns]
        self._mine.copy_(mine[:columns])
        self._ledger[ranks:] = mine[columns:]

    def _predict(self, buffer: FlatBuffer, ledger: Ledger) -> None:
        """Let a staleness remedy look ahead with this rank's own mean gradient."""
        if self.launches_first:
            return
        weight = float(self._mine[Column.WEIGHT])
        if weight == 0:
            return
        present = self._ledger[self._wire.size * len(Column) :].tolist()
        scale = self._clipped(buffer, 1.0 / weight)
        factor = self._options.scaling.factor(ledger.last_weight or weight, float(ledger.weight.sum()))

        def gradients() -> list[torch.Tensor | None]:
            pairs = zip(self.parameters, buffer.views, present, strict=True)
            return [(view * scale).to(parameter.dtype) if here else None for parameter, view, here in pairs]

        with _learning_rates(self._optimizer.param_groups, factor):
            self.staleness.predict(gradients, self._update)

    def _scale_for_wire(self, buffer: FlatBuffer, expected_weight: float) -> None:
        """Divide the sum by what keeps it within range on the wire; it is multiplied back when applied."""
        self._scale = 1.0 / self._options.gradient_predivide_factor
        if self._options.compression is not Compression.none:
            self._scale /= 2.0 ** round(np.log2(expected_weight or FIRST_EXPECTED_WEIGHT))
        if self._scale != 1.0:
            for flat in buffer.tensors:
                flat.mul_(self._scale)

    def poll(self) -> bool:
        return self._handle is not None and self._wire.poll(self._handle)

    def read(self) -> Floats:
        """Take over the completed sums; the rows of all ranks, shape ``(ranks, len(Column))``."""
        assert self._handle is not None and self._in_flight is not None
        self._wire.finish(self._handle)
        self._handle = None
        self._result, self._in_flight = self._in_flight, None
        self._result_scale = self._scale
        for flat, (tensor, context) in zip(self._result.tensors, self._compressed, strict=True):
            if tensor is not flat:
                flat.copy_(self._options.compression.decompress(tensor, context))
        self._compressed = []
        values = self._ledger.cpu().numpy()
        ranks = self._wire.size * len(Column)
        self._result_present = values[ranks:] > 0
        return values[:ranks].reshape(self._wire.size, len(Column))

    # -- the update ------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Take one step of the user's optimizer with the mean gradient; False if it is not finite.

        A parameter that has no gradient on any rank keeps ``p.grad = None``, as in a single process.
        """
        buffer, self._result = self._result, None
        assert buffer is not None
        finite = entry.weight == 0 or bool(buffer.all_finite())
        if entry.weight and finite:
            self._step(buffer, entry.weight, self._options.scaling.factor(entry.weight, samples_before))
        else:
            self.staleness.before_update([None] * len(self.parameters))
        buffer.zero_()
        self._free.append(buffer)
        return finite

    def _step(self, buffer: FlatBuffer, weight: float, learning_rate_factor: float) -> None:
        scale = self._clipped(buffer, 1.0 / (weight * self._result_scale))
        for flat in buffer.tensors:
            flat.mul_(scale)
        pairs = zip(buffer.views, self._result_present, strict=True)
        gradients = [view if present else None for view, present in pairs]
        self.staleness.before_update(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        with _learning_rates(self._optimizer.param_groups, learning_rate_factor):
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

    def options(self) -> int:
        """Fingerprint of all hyper-parameters in ``param_groups``, below 2**48."""
        text = repr(
            [
                sorted((key, _plain(value)) for key, value in group.items() if key != "params")
                for group in self._optimizer.param_groups
            ]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


@torch.no_grad()
def digest_of(parameters: Iterable[torch.Tensor]) -> int:
    """Fingerprint of the parameters' bits, below 2**48; computed where they are."""
    sums = []
    for parameter in parameters:
        bits = parameter.detach().contiguous().view(torch.uint8).view(-1)
        whole = bits[: len(bits) // 4 * 4].view(torch.int32)
        sums += [bits.sum(dtype=torch.int64), whole.sum(dtype=torch.int64), (whole * whole).sum(dtype=torch.int64)]
    return int.from_bytes(hashlib.blake2b(repr(torch.stack(sums).tolist()).encode(), digest_size=6).digest(), "big")


def _plain(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


@contextmanager
def _learning_rates(groups: Iterable[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rates, for one step."""
    if factor == 1.0:
        yield
        return
    kept = [(group, group["lr"]) for group in groups]
    for group, rate in kept:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in kept:
            group["lr"] = rate
