"""AdamW for parameters in the host's memory, at the pace of that memory.

`HostAdamW` is torch.optim.AdamW to its user. Underneath, one call steps all tensors of a group in
one pass (`adamw_one_pass`), which also divides by a gradient scale and writes low-precision copies.
The rungs that lead there are in adam_steps.py, and handed on from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pdt.buckets import names_of
from pdt.flat import is_dense
from pdt.offload import kernel
from pdt.offload.adam_pass import (
    DTYPES,
    adamw_in_chunks,
    adamw_one_pass,
    run_in_chunks,
    run_one_pass,
    same_order,
)
from pdt.offload.adam_state import (
    MOMENTS,
    check_copy,
    check_grad,
    check_param,
    check_saved,
    make_ready,
    new_like,
    saved_states,
    settings_of,
)
from pdt.offload.adam_steps import (
    Settings,
    adamw_foreach,
    adamw_fused,
    adamw_loop,
    bytes_per_element,
    triad,
)

__all__ = ["HostAdamW", "Settings", "adamw_foreach", "adamw_fused", "adamw_in_chunks"]
__all__ += ["adamw_loop", "adamw_one_pass", "bytes_per_element", "triad"]


class HostAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW on the host, with float32 moments, also of parameters in 16 bits.

    Same groups, closures, schedules (lr a float or a tensor), hooks and state dicts, which load
    either way; loading keeps the moments in float32, where torch casts them to the parameter's
    dtype. A parameter in 16 bits is read, stepped in float32 and rounded once. Any strides will do;
    a parameter with gaps, or a gradient with other strides, costs a pass of its own.

    compiled: None for the compiled kernel where there is one, True to insist on it (RuntimeError
        with the reason), False for torch alone. float64, with float64 moments, is always torch's.

    Two attributes take over what otherwise costs a pass each. `grad_scale`, a float, a tensor of
    one element or None: gradients are divided by it as they are read, and stay as they are
    (GradScaler sets it, and `found_inf`). `copies`, from parameter to tensor of its shape: written
    with the new values, in the copy's dtype.

    New values are within 1e-6 of torch.optim.AdamW's in float32, relative to the larger of value
    and learning rate; not bitwise, for torch's square root may be another library's. The kernel
    gives the same bits for any number of threads, and whether a model is flat or many tensors.

    Raises ValueError, with the parameter's name, for parameters not on the CPU, complex ones, and
    such as overlap themselves in memory, and for sparse gradients. No parameter is changed then.
    """

    grad_scale: float | Tensor | None = 1.0  # not None: GradScaler multiplies by what it finds
    found_inf: Tensor | None = None
    copies: Mapping[Tensor, Tensor] = MappingProxyType({})
    compiled: bool | None = None
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        compiled: bool | None = None,
    ) -> None:
        if compiled:
            kernel.get()
        self.compiled = compiled
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings_of(defaults | {"maximize": maximize})  # refuses what cannot be
        super().__init__(params, defaults | {"maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            for param, name in self._named(len(self.param_groups) - 1):
                check_param(param, name)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.found_inf is not None and float(self.found_inf):
            return loss
        scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
        for settings, step, params in self._plan():
            self._update(params, step, settings, scale)
            torch._foreach_add_([self.state[param]["step"] for param in params], 1)
        return loss

    def _plan(self) -> list[tuple[Settings, int, list[Tensor]]]:
        """Which parameters take the same step of their own, after all have been looked at."""
        found = []
        for index, group in enumerate(self.param_groups):
            settings = settings_of(group)
            alike: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
            for param, name in self._named(index):
                if (grad := param.grad) is not None:
                    check_param(param, name)
                    check_grad(grad, name)
                    check_copy(self.copies.get(param), param, name)
                    step = int(make_ready(param, self.state[param])["step"])
                    alike[step + 1, param.dtype == torch.float64].append(param)  # torch's alone
            found += [(settings, step, params) for (step, _), params in alike.items()]
        return found

    def _update(
        self, params: Sequence[Tensor], step: int, settings: Settings, scale: float
    ) -> None:
        """One call for all, on tensors that are laid out alike; what is not is copied around it."""
        held = [p if p.is_contiguous() or is_dense(p) else p.contiguous() for p in params]
        grads = [_laid_out(param.grad, like) for param, like in zip(params, held, strict=True)]
        first, second = ([self.state[param][name] for param in params] for name in MOMENTS)
        copies = list(map(self.copies.get, params))
        beside = [_beside(copy, like) for copy, like in zip(copies, held, strict=True)]
        run = run_in_chunks if self.compiled is False else run_one_pass
        run((held, grads, first, second, beside), step, settings, scale)
        for param, new, copy, written in zip(params, held, copies, beside, strict=True):
            if new is not param:
                param.copy_(new)
            if copy is not None and written is None:
                copy.copy_(new)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, of this class or of AdamW; the moments are taken over in float32.

        ValueError for a state dict with `amsgrad`, or of other shapes; nothing is changed then.
        """
        seen: dict[str, Any] = {}

        def look(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            check_saved(state_dict, self.param_groups)
            seen.update(state_dict)  # as the user's hooks have left it

        def mend(optimizer: torch.optim.Optimizer) -> None:
            for param, saved in saved_states(seen, self.param_groups):
                own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items()}
                self.state[param] = make_ready(param, own)

        first = self.register_load_state_dict_pre_hook(look)
        then = self.register_load_state_dict_post_hook(mend, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            then.remove()

    def _named(self, index: int) -> Iterable[tuple[Tensor, str]]:
        group = self.param_groups[index]
        return zip(group["params"], names_of(group, index), strict=True)


def _laid_out(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient with its elements in the order of the parameter's memory."""
    assert grad is not None
    if same_order(grad, like):
        return grad
    return new_like(like, grad.dtype).copy_(grad)


def _beside(copy: Tensor | None, param: Tensor) -> Tensor | None:
    """The copy, if it can be written in the same pass."""
    if copy is None or copy.device != param.device or not same_order(copy, param):
        return None
    return copy if copy.dtype in DTYPES else None
