from __future__ import annotations

import torch

from horovod_abs.bench.resnet import ResNet18


def test_has_the_size_of_resnet_18() -> None:
    parameters = list(ResNet18().parameters())
    assert len(parameters) == 62
    assert sum(parameter.numel() for parameter in parameters) == 11_173_962


def test_every_parameter_gets_a_gradient() -> None:
    model = ResNet18(classes=7)
    out = model(torch.randn(2, 3, 8, 8))
    assert out.shape == (2, 7)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
