"""The MNIST example with a model that takes as long to exchange as a large one: a rank of :mod:`.accuracy`.

horovodrun -np 4 python -m horovod_abs.bench.accuracy_ranks 11000000 --speeds 1,1,0.5,0.25
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from horovod_abs.examples import mnist, torch_mnist


def padded(parameters: int) -> nn.Module:
    """The example's model with so many further parameters, which are exchanged and otherwise of no use."""
    model = mnist.SmallCNN()
    model.register_parameter("padding", nn.Parameter(torch.zeros(parameters)))
    return model


if __name__ == "__main__":
    padding = int(sys.argv.pop(1))
    torch_mnist.main(lambda: padded(padding))
