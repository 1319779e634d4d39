"""One contiguous tensor in place of many: what is added up and sent in one piece."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch


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
        self._forgotten = False
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
        self._forgotten = False

    def forget(self) -> None:
        """Let what it holds count as zero, without a pass over it: the next :meth:`add_` overwrites."""
        self._forgotten = True

    def recall(self) -> None:
        """Make sure that it holds what counts."""
        if self._forgotten:
            self.zero_()

    @torch.no_grad()
    def add_(self, gradients: Mapping[int, torch.Tensor], weight: float) -> None:
        """Add ``weight`` times the gradients of some parameters, by index."""
        if not self._forgotten:
            views = [self.views[index] for index in gradients]
            torch._foreach_add_(views, list(gradients.values()), alpha=weight)
            return
        for index, view in enumerate(self.views):
            if index in gradients:
                torch.mul(gradients[index], weight, out=view)
            else:
                view.zero_()
        self._forgotten = False

    def all_finite(self) -> torch.Tensor:
        """Whether every element is finite: a boolean tensor without dimensions, on the buffer's device.

        A sum is finite only if all its terms are, and costs one pass. Where it is not, it may have overflowed, so
        the terms are looked at one by one.
        """
        if self.tensors[0].device.type == "cpu":
            finite = all(math.isfinite(flat.sum()) or bool(torch.isfinite(flat).all()) for flat in self.tensors)
            return torch.tensor(finite)
        return torch.stack([torch.isfinite(flat.sum()) for flat in self.tensors]).all()

    def bound(self) -> float:
        """A number that no element exceeds in magnitude; on CPU finite only if every element is, at one pass's cost.

        It is the 2-norm, give or take rounding: infinite where that overflows, and on other devices, which are not
        asked.
        """
        if self.tensors[0].device.type != "cpu":
            return math.inf
        return math.sqrt(sum(float(torch.dot(flat, flat)) for flat in self.tensors))

    def norm(self) -> float:
        """The 2-norm of all elements together."""
        norms = [torch.linalg.vector_norm(flat).to(torch.float64) for flat in self.tensors]
        return float(torch.linalg.vector_norm(torch.stack(norms)))


def _accumulation_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


@torch.no_grad()
def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Fingerprint of the tensors' bits, below 2**48; computed where they are."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(whole[tensor.element_size()])
        sums += [bits.sum(dtype=torch.int64), (bits * bits).sum(dtype=torch.int64)]
    return int.from_bytes(hashlib.blake2b(repr(torch.stack(sums).tolist()).encode(), digest_size=6).digest(), "big")
