"""One executor for every schedule: the stages of a model on several ranks, and their step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pdt.comm.messages import Group, place
from pdt.measure.timeline import Timeline
from pdt.pipeline_parallel.layout import Layout, Values, key_of
from pdt.pipeline_parallel.order import check
from pdt.pipeline_parallel.run import Batch, Run
from pdt.pipeline_parallel.schedule import FORWARD, WEIGHT_GRAD, Action, Schedule
from pdt.pipeline_parallel.transfers import Transfers


class Pipeline:
    """A model of `schedule.num_stages` stages, of which this rank holds `chunks`: chunk c of rank r
    of the group is stage c * num_ranks + r, and its parameters are the rank's to update.

    A stage takes what the stage before returns, a tensor or a tuple of tensors and None (passed as
    its arguments), and may change shapes and dtypes. `loss_fn(output, target)` is a mean over its
    samples; only the last stage's rank calls it. `device` is where messages arrive (default: that
    of the first parameter here). Between two stages each micro-batch sends its activation forth
    and, for the tensors of it that require one, its gradient back. The first message of a shape has
    a header of 2 KiB before it; a step begins with a broadcast of 8 bytes a micro-batch, and 8.

    Data parallelism: average after the step (`average_gradients`), or by an optimizer that does
    (`pdt.zero.Zero1`); a chunk in `pdt.ddp.DDP` averages in its last backward, where the schedule
    does not split backwards. All ranks must build it together. Raises ValueError, on every rank if
    schedules differ, for a schedule that cannot be run or does not fit the group or the chunks.

    Torch's are `torch.distributed.pipelining.PipelineStage` and its schedules.
    """

    def __init__(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        keep_outputs: bool = False,
    ) -> None:
        self.chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
        self.schedule, self.loss_fn, self.group = schedule, loss_fn, group
        self.keep_outputs = keep_outputs
        self.rank, num_ranks = place(group)
        self.device = torch.device(device) if device is not None else _device_of(self.chunks)
        _check_same(schedule, group, self.device)
        _check(self.chunks, schedule, num_ranks)
        self._layouts: dict[tuple[int, int], Layout] = {}
        self.timeline = Timeline(rank=self.rank)
        self.outputs: Values | None = None
        self.peak_in_flight = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.schedule.num_ranks - 1

    def step(self, *inputs: Tensor | None, target: Any = None) -> Tensor | None:
        """Run the schedule: afterwards the gradients of the mean loss over all samples have been
        added to the `.grad` of this rank's parameters. Returns that loss on the last stage's rank,
        None elsewhere.

        The first stage's rank needs `inputs`, the last stage's `target` (a tensor or a tuple); both
        are ignored elsewhere. They are cut along dimension 0 into micro-batches, the first of which
        are longer by one where it does not divide. `timeline` has a span for each action
        afterwards, `peak_in_flight` the most forwards that waited for their B or W here, and
        `outputs`, with `keep_outputs`, the last stage's for all samples.

        Raises ValueError on every rank for a batch with fewer samples than micro-batches.
        """
        with torch.enable_grad():
            return self._run(self.schedule, "train", inputs, target)

    def evaluate(self, *inputs: Tensor | None, target: Any = None) -> Tensor | None:
        """The forwards alone, without a graph: the loss as in `step`, None if there is no target;
        the last stage's rank has its `outputs` afterwards. The modules' mode is the caller's."""
        actions = self.schedule.actions
        forwards = tuple(tuple(a for a in own if a.kind == FORWARD) for own in actions)
        only = Schedule(forwards, self.schedule.num_microbatches, self.schedule.num_chunks)
        with torch.no_grad():
            return self._run(only, "evaluate", inputs, target)

    def _run(
        self, schedule: Schedule, mode: str, inputs: tuple[Tensor | None, ...], target: Any
    ) -> Tensor | None:
        batch, alike = self._agree(inputs, target, mode)
        transfers = Transfers(schedule, self.group, self.device, alike, self._layouts)
        self.timeline = Timeline(rank=self.rank)
        keep = self.is_last and (self.keep_outputs or mode == "evaluate")
        run = Run(self.chunks, self.loss_fn, batch, transfers, self.timeline, keep)
        for action in schedule.actions[self.rank]:
            self._take(run, action)
        transfers.finish()
        self.outputs, self.peak_in_flight = run.outputs(), run.peak_in_flight
        return run.loss

    def _take(self, run: Run, action: Action) -> None:
        try:
            run.take(action)
        except Exception as error:
            stage = self.schedule.stage(self.rank, action.chunk)
            error.add_note(
                f"In {action.kind} of micro-batch {action.microbatch} in stage {stage}, on rank "
                f"{self.rank} of the pipeline."
            )
            raise

    def _agree(
        self, inputs: tuple[Tensor | None, ...], target: Any, mode: str
    ) -> tuple[Batch, list[int]]:
        """The micro-batches that this rank needs, and for each a number that tells its looks."""
        m = self.schedule.num_microbatches
        plan = torch.zeros(m + 1, dtype=torch.int64)
        parts: list[tuple[Any, ...]] = [()] * m
        if self.is_first:
            size = _batch_size(inputs)
            if size >= m:
                parts = _cut(inputs, m)
            looks = [key_of(part, mode) for part in parts] if size >= m else [0] * m
            plan = torch.tensor([size, *looks], dtype=torch.int64)
        if self.schedule.num_ranks > 1:
            plan = plan.to(self.device)
            dist.broadcast(plan, group=self.group, group_src=0)
        size, *alike = plan.tolist()
        if size < m:
            raise ValueError(
                f"a batch of {size} samples cannot be cut into num_microbatches={m}: none may be "
                "empty; pass more samples or make a schedule of fewer micro-batches"
            )
        return Batch(size, parts, self._targets(target, size, mode)), alike

    def _targets(self, target: Any, size: int, mode: str) -> list[Any] | None:
        if not self.is_last or (target is None and mode == "evaluate"):
            return None
        if target is None or self.loss_fn is None:
            missing = "target" if target is None else "loss_fn"
            raise ValueError(f"rank {self.rank} has the last stage and needs {missing}")
        whole = target if isinstance(target, tuple) else (target,)
        if _batch_size(whole) != size:
            raise ValueError(
                f"target has {_batch_size(whole)} samples and the first stage's inputs have {size}"
            )
        cut = _cut(whole, self.schedule.num_microbatches)
        return list(cut) if isinstance(target, tuple) else [one for (one,) in cut]


def _batch_size(tensors: tuple[Tensor | None, ...]) -> int:
    """Of dimension 0, the same in all; ValueError otherwise."""
    sizes = {len(t) for t in tensors if isinstance(t, Tensor) and t.dim()}
    odd = [t for t in tensors if t is not None and not (isinstance(t, Tensor) and t.dim())]
    if len(sizes) != 1 or odd:
        raise ValueError(
            "the batch must be tensors (or None) with one number of samples in dimension 0, and "
            f"has {[tuple(t.shape) if isinstance(t, Tensor) else t for t in tensors]}"
        )
    return sizes.pop()


def _cut(tensors: tuple[Tensor | None, ...], m: int) -> list[tuple[Tensor | None, ...]]:
    pieces = [[None] * m if t is None else t.tensor_split(m) for t in tensors]
    return list(zip(*pieces, strict=True))


def _device_of(chunks: Sequence[nn.Module]) -> torch.device:
    param = next((p for chunk in chunks for p in chunk.parameters()), None)
    return torch.device("cpu") if param is None else param.device


def _check_same(schedule: Schedule, group: Group, device: torch.device) -> None:
    number = int.from_bytes(hashlib.sha256(repr(schedule).encode()).digest()[:8], "big") >> 2
    own = torch.tensor([number], dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    other = [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, found[0])]
    if other:
        raise ValueError(f"ranks {other} have another schedule than rank 0: pass all the same")


def _check(chunks: Sequence[nn.Module], schedule: Schedule, num_ranks: int) -> None:
    if (schedule.num_ranks, schedule.num_chunks) != (num_ranks, len(chunks)):
        raise ValueError(
            f"the schedule is for {schedule.num_ranks} ranks with {schedule.num_chunks} chunks, "
            f"the group has {num_ranks} ranks and this one passes {len(chunks)} chunks"
        )
    check(schedule)
    splits = any(action.kind == WEIGHT_GRAD for _, action in schedule)
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) or (splits and hasattr(chunk, "no_sync")):
            raise ValueError(
                f"a chunk is wrapped in {type(chunk).__name__}, which cannot average in this "
                "schedule: pass the module itself and call average_gradients after the step"
            )
