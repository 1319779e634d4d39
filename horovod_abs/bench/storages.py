"""How many bytes of tensor storage are alive, and the most that ever were.

A dispatch mode sees every operator that PyTorch runs on this thread, inside ``backward`` as well. Each storage that an
operator returns is counted once, by identity, however many views share it, and struck off when PyTorch frees it. What
was alive before is found among the objects that Python's garbage collector knows. Not seen are scratch buffers within
one operator, and memory that other libraries allocate for themselves.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts live storages while it is entered.

    Attributes:
        live: Bytes alive now.
        peak: The most since :meth:`mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> LiveStorages:
        gc.collect()
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                self._count(thing)
                if thing.is_leaf and thing.grad is not None:
                    self._count(thing.grad)
        self.mark()
        super().__enter__()
        return self

    def mark(self) -> None:
        """Begin a new peak."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
