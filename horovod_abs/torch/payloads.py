"""What every exchange has in common: flat tensors and a ledger, summed over ranks without blocking."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compression

from horovod_abs import rounds
from horovod_abs.core.ledger import Column, Flag, Floats
from horovod_abs.torch.flat import FlatBuffer
from horovod_abs.torch.wire import Wire

_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="horovod_abs")


@dataclass(frozen=True)
class Options(rounds.Options):
    """How things are accumulated, sent and applied; see ``DistributedOptimizer``."""

    compression: Any = Compression.none


class ExchangedSum:
    """A flat buffer and the ledger, on their way.

    Written for CUDA as well, where the decision on non-finite values stays on the device and travels as a tensor;
    tested on CPU only.

    Args:
        optimizer: The optimizer whose ``param_groups`` are read.
        update: Takes one step of the user's optimizer from ``p.grad``.
        wire: Sums over ranks.
        name: Prefix of the names under which tensors are exchanged, the same on every rank.
        options: See :class:`Options`.

    Attributes:
        parameters: The parameters that are trained, in the optimizer's order.
        state_is_own: Whether each rank's optimizer keeps a state of its own, unlike the others'.
    """

    state_is_own = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], object],
        wire: Wire,
        name: str,
        options: Options,
    ) -> None:
        self._optimizer = optimizer
        self._update = update
        self._wire = wire
        self._name = name
        self._options = options
        self.parameters: list[torch.Tensor] = []
        self.lay_out()

    def lay_out(self) -> None:
        """Look at the parameters that the optimizer has now. Only while nothing is pending."""
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
        self._job: Future[None] | None = None
        self._sending: Future[None] | None = None
        self._handle: int | None = None
        self._in_flight: FlatBuffer | None = None
        self._result: FlatBuffer | None = None
        self._compressed: list[tuple[torch.Tensor, Any]] = []
        self._ledger = torch.zeros(0, dtype=torch.float64)
        self._mine = self._ledger
        self._scale = self._result_scale = 1.0
        self._result_present = np.zeros(0, dtype=bool)
        self._result_bound = math.inf

    def refuse_thawed(self) -> None:
        """Raise :class:`ValueError` if a parameter that was frozen at first has a gradient."""
        if any(p.grad is not None for p in self._frozen):
            raise ValueError(
                "a parameter that was frozen when DistributedOptimizer was made has a gradient now: make the "
                "optimizer after unfreezing it, or add it with add_param_group after synchronize()"
            )

    def _in_background(self, job: Callable[..., None], *arguments: Any) -> None:
        """Do it after the jobs before it, on CPU in a thread; after one that has failed nothing is done."""
        if self._device.type == "cpu" and self._wire.takes_threads:
            self._job = _worker.submit(_after, self._job, job, *arguments)
        else:
            job(*arguments)

    def _finish_jobs(self) -> None:
        """Wait until all is done. Raises what a job has raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _send_in_background(self, buffer: FlatBuffer, expected_weight: float) -> None:
        self._in_background(self._send, buffer, expected_weight)
        self._sending = self._job

    def _send(self, buffer: FlatBuffer, expected_weight: float) -> None:
        """Start to sum the buffer, and the ledger that was packed."""
        self._scale_for_wire(buffer, expected_weight)
        self._compressed = [self._options.compression.compress(flat) for flat in buffer.tensors]
        sent = [tensor for tensor, _ in self._compressed]
        self._handle = self._wire.sum_([*sent, self._ledger], self._name)
        self._in_flight = buffer

    def _pack(self, row: Floats, present: Floats, buffer: FlatBuffer, factor: float = 1.0) -> None:
        """Lay this rank's row into the tensor that travels along, and behind it what is simply added up over ranks.

        A buffer that is not finite is dropped by selection: it is set to zero, and its weight too.

        Args:
            row: The rank's row of the ledger.
            present: For each parameter whether there is something for it, 1 or 0.
            buffer: What is sent.
            factor: By what it will be multiplied before.
        """
        columns, ranks = len(Column), self._wire.size * len(Column)
        ledger = np.zeros(ranks + len(present) + 1)
        mine = ledger[self._wire.rank * columns :][:columns]
        mine[:], ledger[ranks:-1] = row, present
        on_cpu = self._device.type == "cpu"
        bound = buffer.bound() * factor if row[Column.WEIGHT] > 0 else 0.0
        if on_cpu and not math.isfinite(bound) and not buffer.all_finite():
            mine[Column.WEIGHT], ledger[ranks:-1], bound = 0.0, 0.0, 0.0
            mine[Column.FLAGS] += float(Flag.NONFINITE)
            buffer.zero_()
        ledger[-1] = math.inf if math.isnan(bound) else bound
        self._ledger = torch.from_numpy(ledger).to(self._device)
        self._mine = self._ledger[self._wire.rank * columns :][:columns]
        if not on_cpu and row[Column.WEIGHT] > 0:
            self._drop_on_device(buffer.all_finite(), buffer)

    def _drop_on_device(self, finite: torch.Tensor, buffer: FlatBuffer) -> None:
        """The same without asking the device, which would wait for it."""
        for flat in buffer.tensors:
            flat.masked_fill_(~finite, 0.0)
        self._mine[Column.WEIGHT] *= finite
        self._mine[Column.FLAGS] += float(Flag.NONFINITE) * ~finite
        self._ledger[self._wire.size * len(Column) : -1] *= finite

    def _scale_for_wire(self, buffer: FlatBuffer, expected_weight: float) -> None:
        """Divide the sum by what keeps it within range on the wire; it is multiplied back when applied."""
        self._scale = 1.0 / self._options.gradient_predivide_factor
        if self._options.compression is not Compression.none:
            self._scale /= 2.0 ** round(np.log2(expected_weight or rounds.FIRST_EXPECTED_WEIGHT))
        if self._scale != 1.0:
            for flat in buffer.tensors:
                flat.mul_(self._scale)

    def poll(self) -> bool:
        """Whether the exchange in flight is complete."""
        if self._sending is not None:
            if not self._sending.done():
                return False
            self._sending.result()
            self._sending = None
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
        self._result_present, self._result_bound = values[ranks:-1] > 0, float(values[-1])
        return values[:ranks].reshape(self._wire.size, len(Column))

    def _is_finite(self, result: FlatBuffer) -> bool:
        """Whether the sum is finite: certain where the ranks' bounds cannot add up to an overflow, else one pass."""
        uncompressed = self._options.compression is Compression.none
        certain = uncompressed and rounds.cannot_overflow(self._result_bound, self._result_scale)
        return certain or bool(result.all_finite())

    def options(self) -> int:
        """Fingerprint of all hyper-parameters in ``param_groups``, below 2**48."""
        text = repr(
            [
                sorted((key, _plain(value)) for key, value in group.items() if key != "params")
                for group in self._optimizer.param_groups
            ]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _after(before: Future[None] | None, job: Callable[..., None], *arguments: Any) -> None:
    if before is not None:
        before.result()
    job(*arguments)


def _plain(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


@contextmanager
def learning_rates(groups: Iterable[dict[str, Any]], factor: float) -> Iterator[None]:
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
