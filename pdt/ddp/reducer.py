"""One backward pass of data parallelism: gradients into buckets, buckets onto the wire, and back.

Until the first synchronised backward ends, the reducer is *learning*: it notes in which order the
gradients come and how often each, and sends nothing. Then the ranks exchange their notes, send all
buckets, and before the next backward the buckets are laid out anew in rank 0's order. From then on
a bucket is sent as soon as it is full, lower indices first, so that all ranks make the same calls
in the same order.

Li et al. 2020, sections 3.2 and 4.2 (arXiv:2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from pdt.buckets import Bucket
from pdt.ddp.hooks import Rounds
from pdt.ddp.notes import IDLE, exchange_notes, missing_text
from pdt.ddp.slots import CHUNK_NBYTES, Filling, Settings, Slot, make_buckets
from pdt.listen import listen


class Reducer:
    """Averages the gradients of `named_params` over the ranks of a group, in every backward.

    Each rank holds the mean in `.grad` when a synchronised `backward()` returns. `plan` is the
    current assignment, `scale` what each rank's gradients are multiplied by, `sync` whether a
    backward is synchronised that begins without a word from `begin`, and `before_sync` is called
    when a synchronised one begins.
    """

    def __init__(
        self, named_params: Sequence[tuple[str, nn.Parameter]], settings: Settings
    ) -> None:
        self.settings = settings
        self.slots = [Slot(name, param) for name, param in named_params]
        self.params = [param for _, param in named_params]
        self.plan = settings.plan(self.params)
        self.scale = 1 / dist.get_world_size(settings.group)
        self.sync = True
        self.before_sync: Callable[[], object] = lambda: None
        self._learning = True
        self._buckets: list[Filling] = []
        self._laid_out: list[Bucket] = []  # the plan that the buckets follow
        self._task: int | None = None  # autograd's number of the backward that is open
        self._syncing = False
        self._arrived, self._last = 0, [0] * len(self.slots)  # learning: each one's last place
        self._next = 0  # the bucket to be sent next
        self._in_flight: list[tuple[Rounds, Any]] = []
        self.close = listen(self, named_params, settings.grad_dtype)

    # The beginning of a backward

    def begin(self, sync: bool, _grad: Tensor | None = None) -> None:
        """A backward has reached an output of the module, or its first parameter.

        An output is reached in the outermost of nested backwards, so the end of a nested one (of a
        re-entrant checkpoint) is not taken for the end of all. Another output of the same backward
        may be synchronised when the first was not.
        """
        task = torch._C._current_graph_task_id()
        if self._task not in (task, None):
            self.abandon()
        if self._task is None:
            self._task = task
            self._lay_out()
            Variable._execution_engine.queue_callback(self._end)
        if sync and not self._syncing:
            self._move_all()
            self._syncing = True
            self.before_sync()
            if self.settings.find_unused:
                self._look_ahead()

    def _lay_out(self) -> None:
        """Buckets by the plan of now; here gradients of the step before are usually gone."""
        if self._laid_out is not self.plan:
            self._buckets.clear()
            self._buckets = make_buckets(self.plan, self.slots)
            self._laid_out = self.plan

    def _look_ahead(self) -> None:
        """Do not wait for parameters to which this backward's graph does not lead."""
        for slot in self.slots:
            slot.skipped = not slot.hidden and not slot.is_reached()
            if slot.skipped and not self._learning:
                slot.fill(self.scale)
                slot.bucket.pending -= 1
        self._send_full()

    # A gradient has come

    def arrive(self, index: int) -> None:
        """Autograd has accumulated the gradient of parameter `index` in `.grad`."""
        slot = self.slots[index]
        if self._task is None:
            self.begin(self.sync)
        bucket = slot.bucket
        if not slot.waits:
            slot.waits = True
            bucket.waiting.append(slot)
            bucket.waiting_nbytes += slot.nbytes
        if not self._syncing:
            slot.unreduced = True
        elif self._learning:
            slot.fired += 1
            slot.hidden = slot.skipped
            self._arrived += 1
            self._last[index] = self._arrived
        else:
            if bucket.sent or slot.skipped:
                raise RuntimeError(slot.late_text())
            slot.fired += 1
            if slot.fired == slot.expected:
                bucket.pending -= 1
                if bucket.pending == 0:
                    self._send_full()
        if bucket.waiting_nbytes >= CHUNK_NBYTES:
            self._move(bucket)

    def _move(self, bucket: Filling) -> None:
        bucket.move(self.scale if self._syncing else 1.0, keep=not self._syncing)

    def _move_all(self) -> None:
        for bucket in self._buckets:
            if bucket.waiting:
                self._move(bucket)

    # Sending, and the end

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            bucket = self._buckets[self._next]
            if bucket.waiting:
                self._move(bucket)
            bucket.sent = True
            self._next += 1
            if bucket.flat.numel():
                self._advance(self.settings.hook(bucket, self.settings.group))

    def _advance(self, rounds: Rounds) -> None:
        """Run a hook up to the next work that it waits for, or to its end."""
        work = next(rounds, None)
        if work is not None:
            self._in_flight.append((rounds, work))

    def _wait(self) -> None:
        while self._in_flight:
            waiting, self._in_flight = self._in_flight, []
            for rounds, work in waiting:
                work.wait()
                self._advance(rounds)

    def _end(self) -> None:
        """The backward is over: send what is left, wait, and hand out the means."""
        try:
            self._move_all()
            if self._syncing and any(slot.contributes for slot in self.slots):
                if self._learning:
                    self._learn(self._last_places())
                self._finish()
            elif self._syncing:  # nothing has come: was it torch.autograd.grad?
                for slot in self.slots:
                    slot.is_reached()
        finally:
            self._reset()

    def _last_places(self) -> list[int]:
        """As the notes want them; what only earlier backwards accumulated comes behind."""
        places = list(self._last)
        for index, slot in enumerate(self.slots):
            if slot.contributes and not slot.fired:
                self._arrived += 1
                places[index] = self._arrived
        return places

    def _learn(self, last: list[int]) -> None:
        """Exchange notes with the other ranks, and plan the buckets in the order that came."""
        settings = self.settings
        notes = exchange_notes(last, settings.group, self.params[0].device)
        if notes.missing and not settings.find_unused:
            named = {r: [self.slots[i].name for i in idle] for r, idle in notes.missing.items()}
            raise RuntimeError(missing_text(named))
        self.plan = settings.plan(self.params, notes.order)
        if self.plan == self._laid_out:
            self._laid_out = self.plan
        self._learning = False

    def _finish(self) -> None:
        for slot in self.slots:
            if not slot.fired and not slot.filled:
                slot.fill(self.scale)
        for bucket in self._buckets:
            bucket.pending = 0
        self._send_full()
        contributing = [slot.contributes for slot in self.slots]
        used = self._used_by_any(contributing) if self.settings.find_unused else contributing
        self._wait()
        missing = []
        for slot, is_used in zip(self.slots, used, strict=True):
            slot.param.grad = slot.view if is_used else slot.kept
            slot.unreduced = False
            slot.expected = slot.expected or slot.fired
            if not is_used and not self.settings.find_unused and slot.param.requires_grad:
                missing.append(slot.name)
        if missing:
            raise RuntimeError(missing_text({dist.get_rank(self.settings.group): missing}))

    def _used_by_any(self, own: list[bool]) -> list[bool]:
        """Which parameters have a gradient on some rank; waits for the buckets before it."""
        used = torch.tensor(own, dtype=torch.int32, device=self.params[0].device)
        work = dist.all_reduce(used, group=self.settings.group, async_op=True)
        self._wait()
        work.wait()
        return own if all(own) else [count > 0 for count in used.tolist()]

    def shadow(self) -> None:
        """Make the calls of one synchronised backward with zeros, for ranks that still have one."""
        self._lay_out()
        if self._learning:
            self._learn([IDLE] * len(self.slots))
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.pending = 0
        self._send_full()
        if self.settings.find_unused:
            self._used_by_any([False] * len(self.slots))
        self._wait()
        self._reset()

    def abandon(self) -> None:
        """Forget a backward that ended in an exception; the next one starts afresh."""
        for _, work in self._in_flight:
            try:
                work.wait()
            except RuntimeError:
                pass  # its buffer is free, and that is all that is asked
        self._reset()

    @property
    def is_open(self) -> bool:
        return self._task is not None

    def _reset(self) -> None:
        self._task, self._syncing, self._next = None, False, 0
        self._in_flight = []
        self._arrived, self._last = 0, [0] * len(self.slots)
        for slot in self.slots:
            slot.fired, slot.kept = 0, None
            slot.waits = slot.moved = slot.skipped = slot.filled = False
        for bucket in self._buckets:
            bucket.reset()
