"""One unit: the parameters that one `fully_shard` call took, and who needs them whole at present.

Words: a unit is *gathered* while its flat buffers hold all ranks' shards, and its parameters are
*whole* while it has users: units (itself, or others that share a parameter with it) that are
between the beginning and the end of their forward or backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import nn

from pdt.comm.started import Started
from pdt.zero.flat_params import FlatParams

if TYPE_CHECKING:
    from pdt.zero.passes import Passes


KEY = "_pdt_unit"  # the attribute of a module and of a parameter that says whose it is


class Unit:
    """`flats` hold the parameters that are its own; `borrowed` are units that hold others which
    its module uses, too. `index` counts the units of one root, in the order of its modules."""

    def __init__(self, module: nn.Module, flats: list[FlatParams], borrowed: list[Unit]) -> None:
        self.module, self.flats, self.borrowed = module, flats, borrowed
        self.index, self.name = 0, ""
        self.passes: Passes
        self.reshard_after_forward = True
        self.sharded = [flat for flat in flats if not flat.resident]
        self.resident = [flat for flat in flats if flat.resident]
        self.depth = 0  # of forwards of this module inside each other
        self.users: set[Hashable] = set()
        self.holders: set[Hashable] = set()  # those users that no pass ends: `gathered`
        self.is_gathered = False
        params = {id(param) for flat in flats for param in flat.params}
        self._held = [
            (part._parameters, name, param)
            for part in module.modules()
            for name, param in part._parameters.items()
            if id(param) in params
        ]
        self._gathers: deque[list[Started]] = deque()  # under way, one for each use ahead
        self._is_whole = False
        self._has_bytes = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"unit {self.name!r} belongs to the processes of now: copy the module before "
            "fully_shard, or save a copy of the state_dict() that it has inside gathered(module)"
        )

    @property
    def owners(self) -> list[Unit]:
        return [*self.borrowed, self]

    @property
    def has_grad(self) -> bool:
        """Whether there are gradients that are not reduced, but for those of resident ones."""
        return any(flat.flat_grad is not None for flat in self.sharded)

    def start_gather(self) -> None:
        """Begin to gather, for one use; it may be gathered, or be used, at present."""
        self._has_bytes = True
        self._gathers.append([flat.start_gather() for flat in self.flats])

    def wait(self) -> None:
        """Return when the next of the gathers that are under way has come."""
        if self._gathers:
            for gather in self._gathers[0]:
                gather.wait()
            self._gathers.popleft()
            self.is_gathered = True

    def wait_for_all(self) -> None:
        while self._gathers:
            self.wait()

    def expose(self) -> None:
        if not self._is_whole:
            for flat in self.flats:
                flat.expose()
            self._is_whole = True

    def hide(self) -> None:
        if self._is_whole:
            for flat in self.flats:
                flat.hide()
            self._is_whole = False

    def free(self) -> None:
        """The next use gathers again; the bytes stay if that is under way."""
        self.is_gathered = False
        if self._has_bytes and not self._gathers:
            self._has_bytes = False
            for flat in self.flats:
                flat.free()

    def release(self, user: Hashable, *, keep: bool = False) -> None:
        """`user` needs the parameters no more; the last one frees them, unless they are kept."""
        self.users.discard(user)
        if not self.users:
            self.hide()
            if not keep:
                self.free()

    def keep_own(self) -> None:
        """The shards take over what has been written to this rank's part of the whole."""
        for flat in self.flats:
            flat.keep_own()

    def collect(self) -> bool:
        """Whether gradients have come since the last time, that are to be reduced by a call."""
        for flat in self.resident:
            flat.collect()
        came = [flat.collect() for flat in self.sharded]
        return any(came)

    def check_owned(self) -> None:
        """RuntimeError when a parameter of the module was replaced by another object."""
        for held, name, param in self._held:
            if held.get(name) is not param:
                raise RuntimeError(
                    f"parameter {name!r} of unit {self.name!r} was replaced after fully_shard: "
                    "replace it before, or write to it inside gathered(module, writeback=True)"
                )

    def reset(self) -> None:
        """Sharded, whatever a pass has left; no gather may be under way."""
        self.depth = 0
        self.users &= self.holders
        if not self.users:
            self.hide()
            self.free()
