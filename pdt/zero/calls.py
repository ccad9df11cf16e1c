"""The gathers and reductions of all units under one root, in an order that is the same on all
ranks: that of a script, once one has been recorded, else that of the program, which then has to be
the same on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pdt.zero.reduction import Reduction
from pdt.zero.script import GATHER, REDUCE, Call, Script, first_difference
from pdt.zero.unit import Unit

IN_FLIGHT = 1  # units that are reduced while the next one's gradients are computed
REMEMBERED = 1000  # calls since the ranks agreed last that an error can tell
DIGEST_BITS = 61


class Calls:
    """Makes the calls of `units`; `prefetch` gathers are started ahead of use.

    `script`: which the present pass follows, or records while it has no calls. `reduces`: whether
    this backward does. `digest` tells all calls since `agreed`.
    """

    def __init__(self, units: Sequence[Unit], group: dist.ProcessGroup | None) -> None:
        self.units, self.group = units, group
        self.prefetch = 1
        self.script: Script | None = None
        self.reduces = True
        self.digest = 0
        self._recent: list[Call] = []
        self._ahead: list[Unit] = []  # whose gather has been started ahead of use
        self._reducing: deque[list[Reduction]] = deque()

    @property
    def device(self) -> torch.device:
        devices = (flat.shard.device for unit in self.units for flat in unit.flats)
        return next(devices, torch.device("cpu"))

    @property
    def _records(self) -> bool:
        return self.script is not None and self.script.calls is None

    def follow(self, script: Script) -> None:
        self.script = script
        script.begin()

    def gather(self, unit: Unit) -> None:
        """Returns when it has come."""
        if unit.sharded:
            self._call(Call(GATHER, unit.index))
        else:
            unit.start_gather()
        unit.wait()
        if unit in self._ahead:
            self._ahead.remove(unit)

    def reduce(self, unit: Unit) -> None:
        self._call(Call(REDUCE, unit.index))

    def _call(self, call: Call) -> None:
        """Make this call, and before it those that stand before it in the script."""
        places = self.script.until(call) if self.script is not None else None
        if places is not None:
            self._play(places, wanted=call)
            return
        if self._records:
            self.check_same_call(call)
        self.make(call)

    def make(self, call: Call) -> None:
        """Now, whatever the script says."""
        self._note(call)
        unit = self.units[call.unit]
        if call.kind == GATHER:
            unit.start_gather()
        elif self.reduces:
            self.make_room()
            self._reducing.append([Reduction(f) for f in unit.sharded if f.is_trained])

    def play_rest(self) -> None:
        """Make the calls of the script that have not been wanted."""
        if self.script is not None and self.script.calls is not None:
            self._play(self.script.rest())

    def _play(self, places: Iterator[int], wanted: Call | None = None) -> None:
        script = self.script
        assert script is not None
        assert script.calls is not None
        for place in places:
            call = script.calls[place]
            unit = self.units[call.unit]
            for index in script.gathers(place, self.prefetch):
                self.units[index].start_gather()
                self._ahead.append(self.units[index])
            if call.kind == REDUCE:
                self.make(call)
                continue
            self._note(call)
            if call != wanted:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        """What was gathered for others, and is not wanted here."""
        unit.wait()
        self._ahead.remove(unit)
        if not unit.users:
            unit.free()

    def _note(self, call: Call) -> None:
        if self.script is not None:
            self.script.log.append(call)
        if len(self._recent) < REMEMBERED:
            self._recent.append(call)
        self.digest = (self.digest * 1000003 + _code(call)) % (1 << DIGEST_BITS)

    # Waiting

    def make_room(self) -> None:
        """Wait until another unit may be reduced: before its gradients are copied."""
        while len(self._reducing) >= IN_FLIGHT:
            self._wait_for_reduction()

    def _wait_for_reduction(self) -> None:
        for started in self._reducing.popleft():
            started.wait()

    def wait_for_reductions(self) -> None:
        while self._reducing:
            self._wait_for_reduction()

    def abandon(self) -> None:
        """Wait for what is under way, and forget it."""
        while self._reducing:
            for started in self._reducing.popleft():
                started.abandon()
        self._ahead.clear()
        for unit in self.units:
            unit.wait_for_all()

    # Agreement

    def agreed(self) -> None:
        self._recent, self.digest = [], 0

    def check_same_call(self, call: Call | None) -> None:
        """While a script is recorded: raises on every rank unless all make the same call."""
        if not self._records:
            return
        own = torch.tensor([-1 if call is None else _code(call)], device=self.device)
        codes = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(codes, own, group=self.group)
        found = [int(code.item()) for code in codes]
        if len(set(found)) > 1:
            kinds = (GATHER, REDUCE)
            self._raise([Call(kinds[c % 2], c // 2) if c >= 0 else None for c in found])

    def tell_difference(self) -> None:
        """All ranks know that their digests differ: raises on every rank."""
        logs: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(logs, self._recent, group=self.group)
        self._raise(first_difference(logs))

    def _raise(self, calls: Sequence[Call | None]) -> None:
        said = [
            f"rank {rank} would {call.kind} {self.units[call.unit].name!r}"
            if call
            else f"rank {rank} would do nothing more"
            for rank, call in enumerate(calls)
        ]
        raise RuntimeError(
            f"the ranks used the sharded units in different orders: {'; '.join(said)}. Every rank "
            "must use each unit as often and in the same order, at least in the first step; what "
            "only some ranks use must not be a unit of its own: shard the module that holds it"
        )


def _code(call: Call) -> int:
    return 2 * call.unit + (call.kind == REDUCE)
