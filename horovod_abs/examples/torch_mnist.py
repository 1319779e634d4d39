"""A small CNN on MNIST, on ranks of different speed, with ABS-SGD or with plain Horovod.

    horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --speeds 1,1,0.5,0.25
    horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --speeds 1,1,0.5,0.25 --algorithm ssgd

``train_abs`` and ``train_plain`` show what changes in a Horovod script. The speeds are emulated: each rank's real
compute is stretched by sleeping. On a cluster that really is mixed pass ``--no-emulation``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import horovod.torch as plain_horovod
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod_abs.torch as hvd
from horovod_abs.examples import mnist
from horovod_abs.examples.arguments import PLAIN, parse
from horovod_abs.examples.trial import Batches, Trial
from horovod_abs.observe.summary import Summary, summarise, summarise_totals
from horovod_abs.torch.replay import ReplayTask

Score = Trial[nn.Module, nn.Module]


def train_abs(
    args: argparse.Namespace, model: nn.Module, train_set: TensorDataset, trial: Score
) -> tuple[Summary, Batches]:
    """ABS-SGD: every rank computes as many micro-batches as it can until the next exchange can start."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        exchange=args.exchange,
        clock=args.clock,
        record=args.record,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = hvd.AdaptiveSampler(train_set, optimizer, seed=args.seed)
    loader = DataLoader(train_set, args.micro_batch, sampler=sampler)
    checkpoints = hvd.Checkpointer(args.checkpoint_dir, model, optimizer) if args.checkpoint_dir else None
    if checkpoints:
        checkpoints.restore()

    @optimizer.on_merge
    def keep() -> None:
        if trial.is_due():
            with optimizer.authoritative():
                trial.keep(model, optimizer.samples_seen)

    trial.bar.watch(optimizer)
    loss: torch.Tensor | None = None  # a rank may come away with no batch at all
    for _ in trial.epochs():
        with trial.watch:
            for images, labels in optimizer.epoch(loader):
                optimizer.zero_grad()
                with trial.compute():
                    loss = nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                optimizer.step(samples=len(images))
        if loss is not None:
            optimizer.log(loss=float(loss.detach()))
        if checkpoints:
            checkpoints.save()
        if optimizer.stopped or sampler.epoch >= args.epochs:
            break

    summary = summarise(optimizer.history, trial.watch.seconds, ideal=trial.ideal)
    return summary, [record.samples for record in optimizer.history]


def train_plain(
    args: argparse.Namespace, model: nn.Module, train_set: TensorDataset, trial: Score
) -> tuple[Summary, Batches]:
    """Plain synchronous Horovod: equal micro-batches, and everybody waits for the slowest."""
    optimizer = plain_horovod.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.micro_batch, sampler=sampler)
    batches: Batches = []

    for epoch in trial.epochs():
        sampler.set_epoch(epoch)
        with trial.watch:
            for images, labels in loader:
                optimizer.zero_grad()
                before = trial.computing.seconds
                with trial.compute():
                    nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                batches.append((float(len(images)),) * hvd.size())
                trial.bar.advance(sum(batches[-1]), trial.computing.seconds - before)
                if trial.is_due():
                    trial.keep(model, sum(map(sum, batches)))

    compute_seconds = hvd.allgather(torch.tensor([trial.computing.seconds], dtype=torch.float64)).tolist()
    samples = [sum(by_rank) for by_rank in zip(*batches, strict=True)]
    seconds = trial.watch.seconds
    return summarise_totals(samples, compute_seconds, seconds, rounds=len(batches), ideal=trial.ideal), batches


ALGORITHMS = {"abs": train_abs, PLAIN: train_plain}


def main(make_model: Callable[[], nn.Module] = mnist.SmallCNN) -> None:
    """Train as the command line says; rank 0 reports."""
    args = parse(__doc__)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = mnist.load(seed=args.seed)
    trial: Score = Trial(
        args,
        rank=hvd.rank(),
        size=hvd.size(),
        epoch_samples=len(train_set),
        copy=copy.deepcopy,
        greatest=lambda value: float(hvd.allreduce(torch.tensor(value), op=hvd.Max, name="greatest")),
    )
    model = make_model()
    summary, batches = ALGORITHMS[args.algorithm](args, model, train_set, trial)
    trial.finish(model, summary, batches, lambda kept: mnist.accuracy(kept, test_set))


def replay_task() -> ReplayTask:
    """What ``horovod-abs replay`` needs of a run with the default learning rate and seed."""
    return ReplayTask(
        model=mnist.SmallCNN(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=mnist.load(seed=0)[0],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


if __name__ == "__main__":
    main()
