from __future__ import annotations

import pytest
import torch

from horovod_abs.examples import mnist


def test_the_split_is_of_all_images_and_repeats_with_its_seed() -> None:
    train, test = mnist.load(seed=1)
    assert (len(train), len(test)) == (4000, 1000)
    images, labels = train.tensors
    assert images.shape == (4000, 1, 28, 28)
    assert torch.bincount(torch.cat([labels, test.tensors[1]])).tolist() == [500] * 10
    again, _ = mnist.load(seed=1)
    assert torch.equal(images, again.tensors[0])
    other, _ = mnist.load(seed=2)
    assert not torch.equal(images, other.tensors[0])


def test_images_are_normalised() -> None:
    train, _ = mnist.load()
    assert abs(float(train.tensors[0].mean())) < 0.05
    assert float(train.tensors[0].std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("test_images", [0, 5000])
def test_an_empty_set_is_refused(test_images: int) -> None:
    with pytest.raises(ValueError, match="test_images"):
        mnist.load(test_images=test_images)


def test_accuracy_counts_what_is_right_and_leaves_the_model_in_its_mode() -> None:
    _, test = mnist.load(test_images=50)
    images, labels = test.tensors
    labels = labels.clone()

    class Oracle(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            known = [int(labels[(images == image).flatten(1).all(1)][0]) for image in x]
            return torch.nn.functional.one_hot(torch.tensor(known), 10)

    model = Oracle().train()
    assert mnist.accuracy(model, test) == 1.0
    assert model.training
    labels[:5] = (labels[:5] + 1) % 10
    assert mnist.accuracy(model, test) == 0.9


def test_every_parameter_of_the_model_gets_a_gradient() -> None:
    model = mnist.SmallCNN()
    images = mnist.load()[0].tensors[0][:4]
    model(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 52_138
