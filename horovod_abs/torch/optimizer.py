"""``DistributedOptimizer``: the user's optimizer, stepping once a round instead of after every backward pass."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compression
from horovod.torch.optimizer import _DistributedOptimizer

from horovod_abs.core.clocks import Clock, SyncClock
from horovod_abs.core.scaling import Rule
from horovod_abs.epochs import epoch_batches
from horovod_abs.errors import ExchangeFailed
from horovod_abs.exchanges import Exchange, Gradients, ModelUpdates
from horovod_abs.rounds import Identity, Rounds, RoundsMixin, open_rounds, rounds_of, scaling_for
from horovod_abs.torch import checks
from horovod_abs.torch.data import count_samples, epoch_length
from horovod_abs.torch.gradients import GradientPayload
from horovod_abs.torch.payloads import Options
from horovod_abs.torch.record import open_recorder
from horovod_abs.torch.sampler import adaptive_sampler_of
from horovod_abs.torch.timing import timer_for
from horovod_abs.torch.updates import UpdatePayload
from horovod_abs.torch.wire import open_wire

Batch = TypeVar("Batch")
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: checks.NamedParameters | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    exchange: Exchange | None = None,
    clock: Clock | None = None,
    loss_reduction: str = "mean",
    lr_scaling: Rule = "none",
    reference_batch_size: float | None = None,
    warmup_samples: float = 0,
    warmup_steps: int = 0,
    clip_grad_norm: float | None = None,
    min_micro_batches: int = 1,
    max_micro_batches: int = 64,
    exchange_timeout: float = 60.0,
    digest_every: int = 100,
    record: str | Path | None = None,
) -> Any:
    """Make an optimizer that computes on while gradients are exchanged, and lets every rank do as much as it can.

    The result is an instance of the class of ``optimizer`` and of Horovod's ``_DistributedOptimizer``; state that
    ``optimizer`` already has is kept. Call it on every rank, after ``hvd.init()``.

    >>> optimizer = hvd.DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    ... )
    >>> loader = DataLoader(train_set, batch_size=16, sampler=hvd.AdaptiveSampler(train_set, optimizer))
    >>> for x, y in optimizer.epoch(loader):
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()
    ...     merged = optimizer.step(samples=len(x))

    Args:
        optimizer: The optimizer to wrap, e.g. ``torch.optim.SGD(model.parameters(), lr=0.1)``.
        named_parameters: Pairs of name and parameter, as ``model.named_parameters()``.
        compression: ``hvd.Compression.none`` or ``.fp16``; applied to what is averaged, on the wire, never to counts.
        backward_passes_per_step: Must be 1; see ``CountClock``.
        op: Must be ``hvd.Average``.
        gradient_predivide_factor: The sum is divided by this before the exchange and multiplied by it afterwards.
        num_groups: Must be 0; gradients travel as one group.
        groups: Must be ``None``.
        sparse_as_dense: Convert sparse gradients to dense ones instead of refusing them.
        process_set: The ranks that train together. A rank outside steps by itself.
        exchange: What is averaged: :class:`Gradients` (the default) or :class:`ModelUpdates`.
        clock: When a round ends; :class:`SyncClock` by default.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of ``step``, ``"sum"`` if it is their sum.
        lr_scaling: ``"none"``, ``"linear"`` or ``"sqrt"``: learning rate against the global batch (``ModelUpdates``:
            against the number of ranks).
        reference_batch_size: The global batch, in samples, that the learning rate was tuned for.
        warmup_samples: Samples over which the scaling is phased in.
        warmup_steps: For ``ModelUpdates``: a rank's own steps over which the scaling is phased in.
        clip_grad_norm: Greatest 2-norm of the *global* gradient (``ModelUpdates``: of a micro-batch's own).
        min_micro_batches: Micro-batches that a rank does at least in a round.
        max_micro_batches: Micro-batches after which a rank waits for the exchange.
        exchange_timeout: Seconds without progress after which a waiting rank gives up, naming the missing ones.
        digest_every: Rounds between two comparisons of the ranks' parameters; where they have drifted apart, as on
            unlike processors, all take over those of the first rank.
        record: A file, for this optimizer alone, in which the first rank writes the run down, so that it can be
            watched and repeated; see :mod:`horovod_abs.observe.runlog`. A file that exists is appended to.
            Whenever all ranks close, at the end of an epoch, the parameters are saved beside it.

    Raises:
        ValueError: an option that is out of range, or would not keep its meaning here.
        Mismatch: the ranks were given different models, options or clocks.

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164.
    """
    exchange, clock = exchange or Gradients(), clock or SyncClock()
    checks.refuse_unsupported(
        optimizer,
        {
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "num_groups": num_groups,
            "groups": groups,
        },
    )
    if lr_scaling != "none" and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(f"lr_scaling={lr_scaling!r} needs an optimizer with a learning rate, lr, in every group")
    options = Options(
        scaling=scaling_for(exchange, lr_scaling, reference_batch_size, warmup_samples, warmup_steps),
        compression=compression,
        clip_grad_norm=clip_grad_norm,
        loss_reduction=loss_reduction,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        digest_every=digest_every,
    )
    names = checks.check_names(optimizer, named_parameters)
    wire = open_wire(process_set, exchange_timeout)
    self = _of_both_classes(optimizer)
    identity = Identity.next(process_set)
    step = functools.partial(type(optimizer).step, self)
    payload: GradientPayload | UpdatePayload
    if isinstance(exchange, ModelUpdates):
        payload = UpdatePayload(self, step, wire, identity.name, exchange, options)
    else:
        payload = GradientPayload(self, step, wire, identity.name, exchange, options)
    rounds = self._rounds = open_rounds(
        identity,
        payload,
        wire,
        process_set,
        user_class=type(optimizer),
        timer=timer_for(payload.parameters[0].device),
        exchange=exchange,
        clock=clock,
        options=options,
        min_micro_batches=min_micro_batches,
        max_micro_batches=max_micro_batches,
        exchange_timeout=exchange_timeout,
    )
    self._names = names
    rounds.check_same(checks.describe_parameters(self, names))
    if record is not None and wire.rank == 0 and process_set.included():
        described = asdict(options.named())
        described.update(min_micro_batches=min_micro_batches, max_micro_batches=max_micro_batches)
        rounds.driver.log = open_recorder(record, rounds.driver, self, names, exchange, clock, described)
    _living.add(self)
    return self


class DistributedOptimizerMixin(RoundsMixin, _DistributedOptimizer):
    """What an optimizer made by :func:`DistributedOptimizer` can do besides what its own class can."""

    _rounds: Rounds
    _names: dict[int, str]

    # -- the training loop -----------------------------------------------------------------------------------------

    def step(self, closure: None = None, samples: float | None = None) -> bool:
        """Add the gradients of one micro-batch to the round, and merge if an exchange is complete and the round ends.

        Args:
            closure: Must be ``None``: a closure cannot be evaluated again after an exchange.
            samples: Divisor of the loss: the number of samples in the micro-batch. May be left out inside
                ``epoch``, where it is the length of the batch.

        Returns:
            Whether a merge happened in this call.

        Raises:
            ValueError: a closure; a number of samples that is missing, negative or not finite; a sparse gradient.
            ExchangeTimeout, ExchangeFailed, Mismatch: the exchange did not work out; names rank, cause and remedy.
        """
        rounds = rounds_of(self)
        seconds = rounds.timer.stop()
        if closure is not None:
            raise ValueError("step() takes no closure: it could not be evaluated again after the exchange")
        samples = rounds.driver.batch_size if samples is None else samples
        if samples is None:
            raise ValueError("step() needs samples=, the number of samples that the loss was averaged over")
        if not (samples >= 0 and math.isfinite(samples)):
            raise ValueError(f"samples must not be negative or infinite, got {samples!r}")
        if rounds.driver.failed:
            raise ExchangeFailed(rounds.driver.rank, "an exchange has failed before", "Start the run again")
        if samples:
            rounds.payload.accumulate(samples)
        else:
            self.zero_grad()
        merged = rounds.driver.micro_batch_done(float(samples), seconds)
        rounds.timer.start()
        return merged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the micro-batch; ``step`` has already done so."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def epoch(
        self, loader: Iterable[Batch], *, samples_per_epoch: float | None = None, rounds: int | None = None
    ) -> Iterator[Batch]:
        """Go through ``loader`` until the epoch ends, on all ranks at the same exchange.

        With an :class:`AdaptiveSampler` every sample of the data set is drawn exactly once, by whichever rank has
        time for it. Any other loader is begun again as often as needed: a fast rank goes through it more often than a
        slow one, and the epoch ends when all together have drawn as many samples as it has.

        All ranks call it; leaving it by ``break`` or an exception ends the epoch on all ranks. Nothing is pending
        afterwards (but for a sampler with ``drain=False``).

        Args:
            loader: This rank's batches, e.g. a ``DataLoader``.
            samples_per_epoch: The epoch ends when all ranks together have drawn this many; ``len(loader.dataset)`` by
                default.
            rounds: The epoch ends after so many rounds instead.

        Raises:
            ValueError: no length can be found, or the loader reorders batches (``in_order=False``).
            Mismatch: the ranks' samplers differ.
        """
        state = rounds_of(self)
        state.close_epoch_before()
        sampler = adaptive_sampler_of(loader)
        if sampler is not None:
            if samples_per_epoch is not None or rounds is not None:
                raise ValueError(
                    "an epoch with an AdaptiveSampler ends by itself: leave samples_per_epoch= and rounds= out"
                )
            batches = sampler.batches(loader)
        else:
            drawn = epoch_length(loader, samples_per_epoch, rounds)
            batches = state.driver.epoch(
                epoch_batches(loader), count_samples, drawn=drawn, rounds=math.inf if rounds is None else rounds
            )
        return state.timed(batches)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state, with the ledger under ``"horovod_abs"``; a plain optimizer can load it.

        Raises:
            RuntimeError: something is pending; call ``synchronize()`` first, on every rank.
        """
        rounds = rounds_of(self)
        rounds.refuse_pending("state_dict()")
        state: dict[str, Any] = rounds.user_class.state_dict(self)
        return {**state, "horovod_abs": rounds.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain or of a distributed optimizer.

        Raises:
            RuntimeError: something is pending.
            ValueError: it was written by another number of ranks.
        """
        rounds = rounds_of(self)
        rounds.refuse_pending("load_state_dict()")
        own = {key: value for key, value in state_dict.items() if key != "horovod_abs"}
        if "horovod_abs" in state_dict:
            rounds.load_state_dict(state_dict["horovod_abs"])
        rounds.user_class.load_state_dict(self, own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must, and nothing may be pending."""
        rounds = rounds_of(self)
        rounds.refuse_pending("add_param_group()")
        rounds.user_class.add_param_group(self, param_group)
        known, added = self._names, self.param_groups[-1]["params"]
        group = len(self.param_groups) - 1
        self._names = {**{id(p): f"allreduce.noname.{group}.{j}" for j, p in enumerate(added)}, **known}
        rounds.payload.lay_out()
        rounds.check_same(checks.describe_parameters(self, self._names))

    # -- Horovod's own that would not keep their meaning -----------------------------------------------------------

    def skip_synchronize(self) -> NoReturn:
        """Refused: gradients are clipped where they are applied."""
        raise RuntimeError(
            "skip_synchronize() has no meaning here: gradients are averaged in the background and applied a round "
            "later. To clip them pass clip_grad_norm= to DistributedOptimizer"
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Refused unless 1; see ``CountClock``."""
        if passes != 1:
            raise ValueError("backward_passes_per_step must be 1: use clock=CountClock(n)")

    def _not_used(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this part of Horovod's optimizer is not used here: gradients travel by rounds")

    find_duplicates = _register_hooks = _make_hook = _not_used
    _allreduce_grad_async = _grouped_allreduce_grad_async = _sparse_allreduce_grad_async = _not_used


setattr(DistributedOptimizerMixin.step, "hooked", True)  # torch puts step hooks around the user's own step, not ours  # noqa: B010


def _of_both_classes(optimizer: torch.optim.Optimizer) -> Any:
    """An object with the state of ``optimizer`` that is an instance of its class and of Horovod's.

    The methods stand in the new class's own dictionary, in front of the user's class; ``__module__`` is Horovod's,
    by which ``broadcast_optimizer_state`` knows that it must call the user's ``step``.
    """
    user_class = type(optimizer)
    methods = {**vars(RoundsMixin), **vars(DistributedOptimizerMixin)}
    own = {name: value for name, value in methods.items() if not name.startswith("__")}
    own["__module__"] = _DistributedOptimizer.__module__
    own["__doc__"] = DistributedOptimizerMixin.__doc__
    cls = type(user_class.__name__, (user_class, DistributedOptimizerMixin), own)
    result: Any = object.__new__(cls)
    result.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    # Also merges outside step() come before a scheduler's first step, even of a scheduler made before wrapping.
    result._opt_called = vars(optimizer)["_opt_called"] = True
    result._step_supports_amp_scaling = False  # a GradScaler unscales before step(), where gradients are added up
    return result


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: torch.nn.Module | None = None) -> None:
    """Horovod's ``broadcast_optimizer_state``; for an optimizer of ours the ledger and the samplers go with it.

    Horovod gives an optimizer that has no state some by a step with gradients of zero. With weight decay that moves
    the model, and apart from the root's, if only the root has loaded a state; so parameters are put back here.

    Args:
        optimizer: A plain or a distributed optimizer, with nothing pending.
        root_rank: The rank whose state all take over.
        model: Tells which parameters have sparse gradients.
    """
    if not isinstance(optimizer, DistributedOptimizerMixin):
        hvd.broadcast_optimizer_state(optimizer, root_rank, model)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [] if optimizer.state else [p.detach().clone() for p in parameters]
    hvd.broadcast_optimizer_state(optimizer, root_rank, model)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=False):
            parameter.copy_(value)
    optimizer.zero_grad()
    rounds = rounds_of(optimizer)
    ranks, state = hvd.broadcast_object((rounds.wire.size, rounds.state_dict()), root_rank, name="horovod_abs.state")
    if ranks == rounds.wire.size:  # not a rank outside the root's process set
        rounds.load_state_dict(state)


def join(device: int = -1) -> int:
    """Horovod's ``join``, refused while a distributed optimizer of ours has rounds pending."""
    gc.collect()  # an optimizer that nobody holds any more does not train
    if any(not optimizer._rounds.driver.engine.closed for optimizer in _living):
        raise RuntimeError(
            "hvd.join() during training: ranks may do different numbers of micro-batches anyway. Use "
            "optimizer.epoch(loader), or call optimizer.synchronize() first"
        )
    return int(hvd.join(device))
