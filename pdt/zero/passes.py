"""The forward and the backward pass of all units under one root: what is whole when."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from pdt.zero.agree import any_rank
from pdt.zero.calls import DIGEST_BITS, Calls
from pdt.zero.flat_params import FlatParams
from pdt.zero.script import REDUCE, Call, Script
from pdt.zero.unit import Unit


class Passes:
    """`units` in the order of the root's modules. `sync`: whether a backward reduces.

    A pass follows a script when it is one of the root's own: a training forward, and the backward
    behind it.
    """

    def __init__(self, units: Sequence[Unit], group: dist.ProcessGroup | None) -> None:
        self.units, self.group = list(units), group
        self.flats = [flat for unit in units for flat in unit.flats]
        self.calls = Calls(self.units, group)
        self.sync = True
        self.outermost: Unit | None = None  # whose forward runs, and is inside no other's
        self._forward_script, self._backward_script = Script(), Script()
        self._keeps = False  # the present forward has a backward
        self._forwards = 0  # of the root, whose backward has not run
        self._is_open = False  # a backward

    # Use

    def acquire(self, unit: Unit) -> None:
        """Make whole what the unit's module uses."""
        for owner in unit.owners:
            if owner.passes is not self:
                raise RuntimeError(
                    f"unit {unit.name!r} shares a parameter with one that has another root: call "
                    "fully_shard for a module that holds both"
                )
            owner.users.add(unit)
            self._make_whole(owner)

    def _make_whole(self, owner: Unit) -> None:
        if not owner.is_gathered:
            self.calls.gather(owner)
        owner.expose()

    def hold(self, unit: Unit, holder: Hashable) -> None:
        """Make whole, in the dtype of the shards, until `let_go`."""
        if not unit.users:
            unit.hide()
            unit.free()
            for flat in unit.flats:
                flat.set_exact(True)
        unit.users.add(holder)
        unit.holders.add(holder)
        self._make_whole(unit)

    def let_go(self, unit: Unit, holder: Hashable) -> None:
        unit.holders.discard(holder)
        unit.release(holder)
        if not unit.users:
            for flat in unit.flats:
                flat.set_exact(False)

    # Forward

    def begin_forward(self, unit: Unit) -> None:
        """The outermost forward begins."""
        if not self._is_open:
            self.calls.abandon()
            self._free_all()
        for each in self.units:
            each.check_owned()
        self.outermost, self._keeps = unit, torch.is_grad_enabled()
        if self._keeps and unit is self.units[0]:
            self.calls.follow(self._forward_script)

    def end_use_in_forward(self, unit: Unit) -> None:
        is_outermost = unit is self.outermost
        keep = self._keeps and (is_outermost or not unit.reshard_after_forward)
        for owner in unit.owners:
            owner.release(unit, keep=keep)
        if is_outermost:
            self._end_forward()

    def _end_forward(self) -> None:
        script = self.calls.script
        if script is not None:
            self.calls.play_rest()
            script.learn(only_first=True)
            self._forwards += 1
        self.calls.script, self.outermost = None, None

    def abandon_forward(self) -> None:
        """It ended in an exception; what is under way is waited for when the next one begins."""
        self.calls.script, self.outermost = None, None
        for unit in self.units:
            unit.depth = 0
            unit.hide()

    # Backward

    def begin_backward(self) -> None:
        """A backward has reached an output of a unit."""
        if self._is_open:
            return
        if any(unit.holders for unit in self.units):
            raise RuntimeError("backward() inside gathered(module): leave the block before")
        self._is_open, self.calls.reduces = True, self.sync
        Variable._execution_engine.queue_callback(Ending(self))  # autograd alone holds it
        for flat in self.flats:
            flat.put_aside()
        script = self._backward_script
        if self._forwards and (self.sync or script.calls is not None):
            self.calls.follow(script)

    def end_use_in_backward(self, unit: Unit) -> None:
        for owner in unit.owners:
            owner.release(unit)
        self.calls.make_room()
        if unit.collect() and self.calls.reduces:
            self.calls.reduce(unit)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Reduce the rest, wait, and hand out the means."""
        try:
            for unit in self.units:
                unit.users.clear()
                unit.hide()
                unit.free()
            for unit in self.units:
                self.calls.make_room()
                unit.collect()
            self.calls.play_rest()
            used = (
                self._agree()
                if self.calls.reduces
                else [[False] * len(f.params) for f in self.flats]
            )
            self.calls.wait_for_reductions()
        except BaseException:
            self.abandon_backward()
            raise
        self.calls.abandon()  # what was gathered ahead
        self._free_all()
        for flat, flags in zip(self.flats, used, strict=True):
            flat.hand_out(flags)
        if self.calls.script is not None and self.calls.reduces:
            self._forward_script.learn()
            self._backward_script.learn()
        self.calls.script, self._is_open = None, False
        self._forwards = max(0, self._forwards - 1)

    def _agree(self) -> list[list[bool]]:
        """Which parameters have a gradient on some rank; reduces what some rank has left."""
        calls = self.calls
        calls.check_same_call(None)
        digest = [bool(calls.digest >> i & 1) for i in range(DIGEST_BITS)]
        left = [unit.has_grad for unit in self.units]
        own = [*(f.has_grad for f in self.flats), left, digest, [not bit for bit in digest]]
        *used, left, ones, zeros = _any_rank(own, self.group, calls.device)
        if any(one and zero for one, zero in zip(ones, zeros, strict=True)):
            calls.tell_difference()
        for unit, is_left in zip(self.units, left, strict=True):
            if is_left:
                calls.make(Call(REDUCE, unit.index))
        calls.agreed()
        self._reduce_resident(used)
        return used

    def _reduce_resident(self, used: Sequence[Sequence[bool]]) -> None:
        """All resident parameters of one dtype by one all-reduce."""
        kinds: dict[Any, list[FlatParams]] = {}
        for flat, flags in zip(self.flats, used, strict=True):
            if flat.resident and any(flags):
                kinds.setdefault((flat.reduce_dtype, flat.shard.device), []).append(flat)
        for flats in kinds.values():
            grads = torch.cat([flat.take_flat_grad() for flat in flats])
            dist.all_reduce(grads, group=self.group)
            totals = grads.split([flat.shard.numel() for flat in flats])
            for flat, total in zip(flats, totals, strict=True):
                flat.add_sum(total)

    def abandon_backward(self) -> None:
        """It ended in an exception: keep what was accumulated before it."""
        self.calls.script, self._is_open, self._forwards = None, False, 0
        for unit in self.units:
            unit.hide()
        for flat in self.flats:
            flat.forget()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.reset()


class Ending:
    """Called at the end of a backward, by autograd; dropped uncalled when that raises."""

    def __init__(self, passes: Passes) -> None:
        self._passes: Passes | None = passes

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.end_backward()

    def __del__(self) -> None:
        if self._passes is not None:
            self._passes.abandon_backward()


def _any_rank(
    rows: Sequence[Sequence[bool]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[bool]]:
    """As `any_rank`, for rows of different lengths."""
    (flags,) = any_rank([[flag for row in rows for flag in row]], group, device)
    rest = iter(flags)
    return [[next(rest) for _ in row] for row in rows]
