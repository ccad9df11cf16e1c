"""One optimizer for parameters that ranks share: each rank updates the slice that it owns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdt.ddp.shared_memory import Flat

NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """One parameter's place: from element `start` on in `home`; `view` is that of its sum.

    `round` is the backward in which this rank last had its turn with it. `kept`: the sum goes on
    from what is there, though `.grad` does not show it while backward runs.
    """

    index: int
    name: str
    param: nn.Parameter
    home: Flat
    start: int
    view: Tensor | None
    address: int
    owner: weakref.ref
    round: int = 0
    kept: bool = False

    def hide_shared(self) -> None:
        """Take the shared sum out of `.grad`, where autograd would add to it."""
        if self.param.grad is self.view and self.view is not None:
            self.param.grad, self.kept = None, True

    def take_private(self) -> Tensor | None:
        """The gradient in this rank's own memory, if it has one."""
        grad = self.param.grad
        if grad is not None and (grad.layout is not torch.strided or grad.requires_grad):
            self.home.memory.give_up()
            raise RuntimeError(
                f"the gradient of {self.name} is sparse or has a graph of its own (create_graph): "
                "shared gradients are dense numbers"
            )
        return grad

    def piece(self) -> tuple[int, int] | None:
        """From where to where in `home` this rank owns elements of the parameter, if it does."""
        rank = self.home.memory.rank
        low = max(self.start, self.home.cuts[rank])
        high = min(self.start + self.param.numel(), self.home.cuts[rank + 1])
        return (low, high) if low < high else None


class SharedOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class` on the elements that this rank owns: 1/N of states and of work.

    `params` are those of a `SharedParameters` module, or groups of them as torch takes them;
    `defaults` go to `optimizer_class`, which must treat each element by itself, as SGD, Adam and
    AdamW do. After `step()` every rank sees all new values. `param_groups` are those of the whole
    parameters, for schedulers of the learning rate; `optim` is the optimizer of this rank's pieces.
    A parameter without a gradient on any rank is left alone. All ranks must call `step` and
    `clip_grad_norm_`, with equal learning rates (RuntimeError on every rank otherwise).
    Raises ValueError for parameters that are not shared and for optimizers known not to fit.
    """

    optim: torch.optim.Optimizer

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **defaults: Any,
    ) -> None:
        probe = optimizer_class([nn.Parameter(torch.empty(0))], **defaults)
        if type(probe).__name__ in NOT_ELEMENTWISE:
            raise ValueError(
                f"{type(probe).__name__} looks at whole parameters, and a rank updates slices of "
                "them: use one that treats each element by itself, such as AdamW"
            )
        self._pieces: dict[Slot, nn.Parameter] = {}
        super().__init__(params, probe.defaults)
        self.optim = optimizer_class([self._own(g) for g in self.param_groups], **defaults)
        slots = self._slots()
        if not slots:
            raise ValueError("all these parameters are frozen: there is nothing to optimize")
        self._memory = slots[0].home.memory

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for slot in self._slots(self.param_groups[-1]):
            if (piece := slot.piece()) is not None:
                self._pieces[slot] = nn.Parameter(slot.home.params[slice(*piece)])
        if hasattr(self, "optim"):
            self.optim.add_param_group(self._own(self.param_groups[-1]))

    def _slots(self, *groups: dict[str, Any]) -> list[Slot]:
        """The slots of all trained parameters in these groups, or in all."""
        slots = []
        for param in (p for group in groups or self.param_groups for p in group["params"]):
            slot = getattr(param, "shared_slot", None)
            if slot is None:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not shared: pass the parameters "
                    "of SharedParameters(module)"
                )
            if slot.view is not None:
                slots.append(slot)
        return slots

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group for `optim`: pieces in place of parameters."""
        pieces = [self._pieces[slot] for slot in self._slots(group) if slot in self._pieces]
        return {**_settings(group), "params": pieces}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slice; all ranks see all new values when it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        rates = ", ".join(f"{float(group.get('lr', 0))!r}" for group in self.param_groups)
        self._memory.meet(f"step with lr {rates}")  # nobody reads the parameters any more
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            own.update(_settings(group))
        for slot, piece in self._pieces.items():
            piece.grad = self._gradient(slot)
        self.optim.step()
        for piece in self._pieces.values():
            piece.grad = None
        self._memory.meet("end of step")  # nobody reads half new ones
        changed = [slot.param for slot in self._slots()]
        torch.autograd.graph.increment_version(changed)  # a graph that saved them is not valid
        return loss

    def _gradient(self, slot: Slot) -> Tensor | None:
        """This rank's piece of the sum, in the parameter's dtype."""
        piece, sums = slot.piece(), slot.home.sums
        if slot.param.grad is None or piece is None or sums is None:
            return None
        return sums[slice(*piece)].to(slot.param.dtype)

    def _check(self) -> None:
        slots = self._slots()
        for shared in {slot.owner() for slot in slots}:
            if shared is not None:
                shared.check()
        for slot in slots:
            own = slot.param.grad is not None and slot.param.grad is not slot.view
            if own or slot.home.is_changed:
                self._memory.give_up()
                raise RuntimeError(
                    f"the gradient of {slot.name} was "
                    + ("made" if own else "changed")
                    + " outside of a synchronised backward: gradients are shared by all ranks, "
                    "and each would change them; clip by optimizer.clip_grad_norm_"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._memory.meet("zero_grad")  # nobody reads the gradients any more
        super().zero_grad(set_to_none)
        for slot in self._slots():
            slot.kept = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, on the shared gradients: the norm of all before, the same on every rank."""
        slots = [slot for slot in self._slots() if slot.param.grad is not None]
        norm = nn.utils.get_total_norm(
            [slot.view for slot in slots if slot.view is not None], norm_type
        )
        self._memory.meet(f"clip_grad_norm_ to {max_norm}")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for slot in slots:
            if (piece := slot.piece()) is not None and slot.home.sums is not None:
                slot.home.sums[slice(*piece)].mul_(factor)
        self._memory.meet("end of clip_grad_norm_")
        for slot in slots:
            slot.home.mark()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank's pieces, and which they are: save one for each rank."""
        pieces = [[slot.name, *(slot.piece() or ())] for slot in self._pieces]
        return {**self.optim.state_dict(), "pieces": pieces}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what the same rank saved; ValueError when the pieces are others."""
        own, saved = self.state_dict()["pieces"], state_dict["pieces"]
        if own != saved:
            raise ValueError(
                f"the states are of the pieces {saved[:2]}..., this rank owns {own[:2]}...: load "
                "what the same rank saved, with as many ranks"
            )
        self.optim.load_state_dict({k: v for k, v in state_dict.items() if k != "pieces"})
        for group, loaded in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_settings(loaded))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}
