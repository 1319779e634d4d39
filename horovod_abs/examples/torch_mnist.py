"""A small CNN on MNIST, on ranks of different speed, with ABS-SGD or with plain Horovod.

    horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --speeds 1,1,0.5,0.25
    horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --speeds 1,1,0.5,0.25 --algorithm ssgd

``train_abs`` and ``train_plain`` show what changes in a Horovod script. The speeds are emulated: each rank's real
compute is stretched by sleeping. On a cluster that really is mixed pass ``--no-emulation``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import horovod.torch as plain_horovod
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod_abs.torch as hvd
from horovod_abs import emulate, options
from horovod_abs.examples import mnist
from horovod_abs.examples.trial import Trial, label_of, report
from horovod_abs.observe.results import Result
from horovod_abs.observe.summary import Summary, summarise, summarise_totals
from horovod_abs.torch.replay import ReplayTask

Batches = list[tuple[float, ...]]


def train_abs(
    args: argparse.Namespace, model: nn.Module, train_set: TensorDataset, trial: Trial
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
    args: argparse.Namespace, model: nn.Module, train_set: TensorDataset, trial: Trial
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


ALGORITHMS = {"abs": train_abs, "ssgd": train_plain}


def main() -> None:
    """Train as the command line says; rank 0 reports."""
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = mnist.load(seed=args.seed)
    if args.no_emulation:
        pace, ideal = None, None
    else:
        pace = emulate.from_speeds(args.speeds, 1e-3 * args.base_ms, hvd.rank(), jitter=args.jitter, seed=args.seed)
        ideal = sum(args.micro_batch * speed / (1e-3 * args.base_ms) for speed in args.speeds[: hvd.size()])
    trial = Trial(
        epochs=args.epochs,
        epoch_samples=len(train_set),
        max_seconds=args.max_seconds,
        eval_every=args.eval_every,
        pace=pace,
        ideal=ideal,
    )
    model = mnist.SmallCNN()
    summary, batches = ALGORITHMS[args.algorithm](args, model, train_set, trial)
    if hvd.rank() == 0:
        trial.keep(model, summary.samples)
        run_with = {name: value if isinstance(value, int | float) else str(value) for name, value in vars(args).items()}
        label = "synchronous Horovod" if args.algorithm == "ssgd" else label_of(args.exchange)
        report(Result(label, trial.curve(test_set), tuple(batches), summary, run_with), args.target_accuracy, args.json)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="abs", help="ours, or plain Horovod (default: abs)")
    parser.add_argument("--epochs", type=_positive_int, default=10)
    parser.add_argument("--micro-batch", type=_positive_int, default=16, help="samples (default: 16)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument(
        "--clock",
        type=_checked(options.clock),
        default="sync",
        help="sync, count:N, interval:S, target:N, or replay:LOG",
    )
    parser.add_argument(
        "--exchange",
        type=_checked(options.exchange),
        default="gradients",
        help="gradients (as published), lookahead, taylor, waiting, or updates (default: gradients)",
    )
    parser.add_argument("--speeds", type=_checked(options.positive_numbers), default="1,1,0.5,0.25", help="by rank")
    parser.add_argument("--base-ms", type=float, default=20.0, help="a micro-batch at speed 1 (default: 20)")
    parser.add_argument("--jitter", type=float, default=0.0, help="deviation of the logarithm of a micro-batch's time")
    parser.add_argument("--no-emulation", action="store_true", help="compute as fast as the hardware does")
    parser.add_argument("--target-accuracy", type=float, help="print the training time to this test accuracy")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop with the epoch in which they pass")
    parser.add_argument("--eval-every", type=float, default=1.0, help="seconds of training between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--record", type=Path, help="write a run log, for horovod-abs replay, timeline and plot")
    parser.add_argument("--checkpoint-dir", type=Path, help="write checkpoints, and go on from the last one")
    args = parser.parse_args(arguments)
    if args.algorithm == "ssgd" and (args.checkpoint_dir or args.record):
        parser.error("--checkpoint-dir and --record are for --algorithm abs")
    return args


def replay_task() -> ReplayTask:
    """What ``horovod-abs replay`` needs of a run with the default learning rate and seed."""
    return ReplayTask(
        model=mnist.SmallCNN(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=mnist.load(seed=0)[0],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    def checked(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


if __name__ == "__main__":
    main()
