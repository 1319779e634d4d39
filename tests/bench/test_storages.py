from __future__ import annotations

import torch

from horovod_abs.bench.storages import LiveStorages

SIZE = 1000 * 4


def test_counts_each_storage_once_until_it_is_freed() -> None:
    x = torch.ones(1000)
    with LiveStorages() as storages:
        before = storages.live
        y = x + 1
        view = y.view(10, 100)[2:]
        assert storages.live - before == SIZE
        del y
        assert storages.live - before == SIZE
        del view
        assert storages.live == before
        assert storages.peak - before == SIZE


def test_finds_what_was_there_before_and_begins_new_peaks() -> None:
    with LiveStorages() as storages:
        without = storages.live
    kept = torch.ones(1000)
    with LiveStorages() as storages:
        assert storages.live - without == SIZE
        temporary = kept * 2
        del temporary
        storages.mark()
        kept.add_(1)
        assert storages.peak - without == SIZE


def test_sees_gradients_and_what_backward_holds_meanwhile() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    with LiveStorages() as storages:
        before = storages.live
        (parameter * 2).square().sum().backward()
        assert storages.live - before == SIZE
        storages.mark()
        (parameter * 2).square().sum().backward()  # the saved activation, the gradient, and the one added to it
        assert storages.peak - before >= 3 * SIZE
        assert storages.live - before == SIZE
