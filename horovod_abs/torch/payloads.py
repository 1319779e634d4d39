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

from horovod_abs.core.ledger import Column, Entry, Flag, Floats
from horovod_abs.core.scaling import Scaling
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
        options: See :class:`GradientOptions`.
    """

    launches_first = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], object],
        wire: Wire,
        name: str,
        options: GradientOptions,
    ) -> None:
        self._optimizer = optimizer
        self._update = update
        self._wire = wire
        self._name = name
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

    def launch(self, row: Floats, expected_weight: float) -> None:
        """Start to sum the accumulator and the ledger over all ranks."""
        buffer, self._accumulator = self._accumulating(), None
        self._pack_ledger(row, buffer)
        self._scale_for_wire(buffer, expected_weight)
        self._compressed = [self._options.compression.compress(flat) for flat in buffer.tensors]
        sent = [tensor for tensor, _ in self._compressed]
        self._handle = self._wire.sum_([*sent, self._ledger], self._name)
        self._in_flight = buffer

    def _pack_ledger(self, row: Floats, buffer: FlatBuffer) -> None:
        """Lay this rank's row, and which parameters have a gradient, into the tensor that is summed."""
        columns = len(Column)
        mine = torch.from_numpy(row).to(self._device, copy=True)
        present = torch.from_numpy(self._present).to(self._device, copy=True)
        if row[Column.WEIGHT] > 0:
            finite = buffer.all_finite()
            mine[Column.WEIGHT] = torch.where(finite, mine[Column.WEIGHT], 0.0)
            mine[Column.FLAGS] += torch.where(finite, 0.0, float(Flag.NONFINITE))
            present = torch.where(finite, present, 0.0)
            if self._device.type != "cpu":
                for flat in buffer.tensors:
                    flat.masked_fill_(~finite, 0.0)
            elif not finite:
                buffer.zero_()
        self._present[:] = 0.0
        self._ledger = torch.zeros(self._wire.size * columns + len(present), dtype=torch.float64, device=self._device)
        self._ledger[self._wire.rank * columns : (self._wire.rank + 1) * columns] = mine
        self._ledger[self._wire.size * columns :] = present

    def _scale_for_wire(self, buffer: FlatBuffer, expected_weight: float) -> None:
        """Divide the sum by what keeps it within range on the wire; multiplied back when it is applied."""
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
        buffer.zero_()
        self._free.append(buffer)
        return finite

    def _step(self, buffer: FlatBuffer, weight: float, learning_rate_factor: float) -> None:
        scale = 1.0 / (weight * self._result_scale)
        if self._options.clip_grad_norm is not None:
            norm = buffer.norm() * scale
            scale *= min(1.0, self._options.clip_grad_norm / (norm + 1e-6))
        for flat in buffer.tensors:
            flat.mul_(scale)
        for parameter, view, present in zip(self.parameters, buffer.views, self._result_present, strict=True):
            parameter.grad = view.to(parameter.dtype) if present else None
        with _learning_rates(self._optimizer.param_groups, learning_rate_factor):
            self._update()
        for parameter in self.parameters:
            parameter.grad = None

    def options(self) -> int:
        """Fingerprint of all hyper-parameters in ``param_groups``, below 2**48."""
        text = repr(
            [
                sorted((key, _plain(value)) for key, value in group.items() if key != "params")
                for group in self._optimizer.param_groups
            ]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


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
