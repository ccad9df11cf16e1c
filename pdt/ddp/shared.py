"""One copy of the parameters per node: ranks of one machine map the same memory.

Data-parallel ranks hold equal parameters, and on one machine equal memory can be the same memory:
torch's DDP keeps N copies, here N ranks hold one. Gradients are added up in one shared buffer, too,
and each rank's optimizer updates its own slice (`SharedOptimizer`), so states are 1/N per rank.

    module.weight --.data--> flat.params (one per dtype, shared)      written by SharedOptimizer
    .grad, private, until backward has made it; then                  one parameter's at a time
    slot.view ------------> flat.sums   (shared, the mean over ranks) written by all, in turns
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdt.comm.replicate import broadcast, check_same, describe
from pdt.ddp.shared_memory import Flat, NodeMemory, common_key
from pdt.ddp.shared_optimizer import SharedOptimizer, Slot
from pdt.flat import offsets, view_like
from pdt.listen import set_grad_dtype

__all__ = ["SharedOptimizer", "SharedParameters"]

LOW = (torch.float16, torch.bfloat16)
NO_COPY = "shared parameters cannot be copied or pickled: copy model.module, or save state_dict()"


class SharedParameters(nn.Module):
    """Wraps `module`: its parameters lie in memory that all ranks of `group` share.

    >>> model = SharedParameters(module)
    >>> optimizer = SharedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank sees rank 0's values; buffers are set to rank 0's and stay private. The ranks must be
    on one machine and hold the module on the CPU. After `loss.backward()`, `.grad` is on every rank
    a view of one shared buffer that holds the mean over ranks: g_0/N + g_1/N + ..., added in the
    order of ranks, so the bits are those of torch's DDP over a group that adds in this order.
    While backward runs, a rank holds the gradients of one parameter, not of all. A rank
    without a gradient counts as zero; where no rank has one, `.grad` stays as it was. Sums of
    float16 and bfloat16 are formed and kept in float32, and `.grad` is float32 then.

    A second backward adds to what is there until `zero_grad`. Do not change `.grad` in place: each
    of N ranks would. (The optimizer's step raises if you did; it has a `clip_grad_norm_`.) What
    counts for `no_sync` is where backward runs. Wherever all ranks must come (the beginning
    and end of backward, the step, `load_state_dict`) a rank waits at most `timeout_s`, then names
    those that did not come; a peer that has died is named soon.

    Raises ValueError, the same on every rank, when modules differ, ranks are not on one machine, or
    a parameter is not a dense CPU tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        key = common_key(group, _unfit(module))
        check_same(describe(module), group, torch.device("cpu"))
        self.module = module
        self._slots: list[Slot] = []
        self._memory = self._share(group, key, timeout_s)
        broadcast(list(module.buffers()), group)
        self._memory.meet("construction")
        self._trained = [slot for slot in self._slots if slot.view is not None]
        self._sync, self._open, self._round = True, False, 0

    def _share(self, group: dist.ProcessGroup | None, key: str, timeout_s: float) -> NodeMemory:
        """Make the memory, with room for all, and move the parameters there."""
        named = dict(self.module.named_parameters())  # a tied one once, by its first name
        layout: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name, param in named.items():
            layout.setdefault((param.dtype, param.requires_grad), []).append(name)
        wanted, sums = [], []
        for (dtype, trained), names in layout.items():
            numel = sum(named[name].numel() for name in names)
            wanted.append((dtype, numel))
            if trained:
                sums.append((torch.float32 if dtype in LOW else dtype, numel))
        memory = NodeMemory(group, key, wanted + sums, len(named), timeout_s)
        places, sum_places = memory.tensors, iter(memory.tensors[len(wanted) :])
        for (_, trained), names, place in zip(layout, layout.values(), places, strict=False):
            home = Flat(place, next(sum_places) if trained else None, memory)
            self._move({name: named[name] for name in names}, home)
        return memory

    def _move(self, named: Mapping[str, nn.Parameter], home: Flat) -> None:
        """Point these parameters into `home`, where rank 0 puts its values."""
        numels = [param.numel() for param in named.values()]
        home.cut(numels)
        for start, (name, param) in zip(offsets(numels), named.items(), strict=False):
            place = view_like(home.params, start, param)
            if home.memory.rank == 0:
                place.copy_(param.data)
            param.data = place
            view = None if home.sums is None else view_like(home.sums, start, param)
            this = weakref.ref(self)
            slot = Slot(len(self._slots), name, param, home, start, view, place.data_ptr(), this)
            self._slots.append(slot)
            param.shared_slot = slot  # type: ignore[attr-defined]  # for SharedOptimizer
            if view is not None:
                set_grad_dtype(param, view.dtype)
                # weak, since Python cannot free circles that go through autograd's hooks
                param.register_hook(partial(_before, weakref.ref(slot)))
                param.register_post_accumulate_grad_hook(partial(_after, weakref.ref(slot)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients in this rank's own memory, as sums; the first
        backward after it adds them to the shared ones, also of parameters that it does not use."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._memory.meet("zero_grad")  # nobody reads the gradients any more
        super().zero_grad(set_to_none)
        for slot in self._trained:
            slot.kept = False

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Every rank calls it, with equal values; nobody returns before all have loaded."""
        if assign:
            raise ValueError("assign=True would put other tensors in place of the shared ones")
        self._memory.meet("load_state_dict")
        keys = super().load_state_dict(state_dict, strict)
        self._memory.meet("end of load_state_dict")
        return keys

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(NO_COPY)

    def add_gradient(self, slot: Slot) -> None:
        """Backward has made a gradient: add it to the shared sum, in turn, and let go of it."""
        if not self._sync:
            return
        if self._open and slot.round == self._round:  # used again, by a re-entrant checkpoint
            grad, slot.param.grad = slot.param.grad, None
            self._end_round()
            slot.hide_shared()
            slot.param.grad = grad
        if not self._open:
            self._begin_round()
        self._fold(slot)

    def _begin_round(self) -> None:
        self._open, self._round = True, self._round + 1
        # A slower rank may still read the gradients of the step before.
        self._memory.meet(f"backward {self._round}")
        torch.autograd.Variable._execution_engine.queue_callback(self._end_round)

    @torch.no_grad()
    def _fold(self, slot: Slot) -> None:
        grad, slot.param.grad = slot.take_private(), None
        filled = self._memory.take_turn(slot.index, self._round)
        if grad is not None:
            assert slot.view is not None
            part = grad.mul_(1 / self._memory.world_size)  # before the sum, which could overflow
            slot.view.add_(part) if filled or slot.kept else slot.view.copy_(part)
        self._memory.pass_on(slot.index, self._round, filled or grad is not None)
        slot.round = self._round

    def _end_round(self) -> None:
        """All ranks have come: `.grad` is the mean wherever a rank had a gradient."""
        if not self._open:
            return
        for slot in self._trained:
            if slot.round != self._round:
                slot.hide_shared()
                self._fold(slot)
        self._memory.meet("end of backward")
        self._open = False
        for slot in self._trained:
            if slot.kept or self._memory.is_filled(slot.index):
                slot.param.grad = slot.view
            slot.kept = False
            slot.home.mark()

    def check(self) -> None:
        """Raises ValueError when a parameter is no longer the one that was wrapped."""
        found = dict(self.module.named_parameters())
        for slot in self._slots:
            param = found.pop(slot.name, None)
            if param is not slot.param or param.data_ptr() != slot.address:
                _refuse(self._memory, f"parameter {slot.name} has been replaced or moved")
            if param.requires_grad and slot.view is None:
                _refuse(self._memory, f"parameter {slot.name} has been unfrozen")
        if found:
            _refuse(self._memory, f"parameter {next(iter(found))} has been added")


def _refuse(memory: NodeMemory, what: str) -> NoReturn:
    memory.give_up()
    raise ValueError(f"{what} since it was shared: make all changes before SharedParameters(...)")


def _before(ref: weakref.ref[Slot], grad: Tensor) -> None:
    """Autograd adds to `.grad` in place: it must not find the shared memory there."""
    if (slot := ref()) is not None:
        slot.hide_shared()


def _after(ref: weakref.ref[Slot], param: Tensor) -> None:
    slot = ref()
    if slot is not None and (shared := slot.owner()) is not None:
        shared.add_gradient(slot)


def _unfit(module: nn.Module) -> str | None:
    """Why the module's parameters cannot be shared, or None."""
    for name, param in module.named_parameters():
        if is_lazy(param):
            return f"parameter {name} has no shape yet: run the module once"
        if param.device.type != "cpu" or param.layout is not torch.strided:
            return (
                f"parameter {name} is on {param.device} with layout {param.layout}, but shared "
                "parameters are dense tensors in the CPU's memory: use DDP, a copy for each rank"
            )
    return None
