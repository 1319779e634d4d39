"""ResNet-18 for small images; at full width 62 tensors, 11,173,962 parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(out)) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """Takes images of shape ``(batch, channels, height, width)`` with sides of at least 8.

    Args:
        classes: Of the images.
        width: Of the first stage; doubles with each of the four.
        channels: Of the images.

    References:
        He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385: the 18-layer network of table 1,
        with the 3×3 stem that is usual for small images.
    """

    def __init__(self, classes: int = 10, *, width: int = 64, channels: int = 3) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
        for stage in range(4):
            after = width * 2**stage
            layers += [_Block(before, after, 1 if stage == 0 else 2), _Block(after, after, 1)]
            before = after
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
