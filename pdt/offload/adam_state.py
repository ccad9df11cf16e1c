"""What `HostAdamW` holds of a parameter and what it refuses: pure, without any arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pdt.flat import is_dense
from pdt.offload.adam_pass import DTYPES, same_order
from pdt.offload.adam_steps import Settings

MOMENTS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]


def settings_of(group: Mapping[str, Any]) -> Settings:
    """A group's settings as numbers; a schedule may have made them tensors."""
    lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Settings(lr, (beta1, beta2), eps, weight_decay, bool(group["maximize"]))


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor (or may, for odd strides)."""
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (n - 1)
    return False


def check_param(param: Tensor, name: str) -> None:
    """ValueError for a parameter that is not numbers of its own in the host's memory."""
    if param.device.type != "cpu":
        raise ValueError(
            f"{name} is on {param.device}, and HostAdamW steps what is in the host's memory: use "
            "torch.optim.AdamW(fused=True) there, or pdt.offload.OffloadedAdamW to step it here"
        )
    if param.dtype not in DTYPES and (param.is_complex() or param.requires_grad):
        raise ValueError(f"{name} is {param.dtype}, and HostAdamW knows {DTYPES}")
    if not param.is_contiguous() and overlaps(param):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} has strides {param.stride()}: elements share "
            "memory, and none can be stepped by itself; give it memory of its own (.clone())"
        )


def check_grad(grad: Tensor, name: str) -> None:
    """ValueError for a gradient that is not dense numbers."""
    if grad.layout is not torch.strided or grad.dtype not in DTYPES:
        raise ValueError(
            f"the gradient of {name} is {grad.dtype}, {grad.layout}: HostAdamW steps dense "
            "parameters (sparse gradients: torch.optim.SparseAdam, or Embedding(sparse=False))"
        )


def check_copy(copy: Tensor | None, param: Tensor, name: str) -> None:
    """ValueError for a copy of another shape."""
    if copy is not None and copy.shape != param.shape:
        raise ValueError(
            f"copies has {tuple(copy.shape)} for {name}, whose shape is {tuple(param.shape)}"
        )


def make_ready(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Bring a state into its form, in place: a new one where it is empty.

    `step` is float32 (), the moments are float32 (float64 for a float64 parameter) and laid out
    like the parameter in memory, so that one pass runs through all of them in order.
    """
    step = state.setdefault("step", 0.0)
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device.type != "cpu":
        state["step"] = torch.tensor(float(step), dtype=torch.float32)
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    is_plain = param.is_contiguous() or not is_dense(param)
    for name in MOMENTS:
        moment = state.get(name)
        if moment is None:
            state[name] = new_like(param, dtype).zero_()
        elif moment.dtype != dtype or not (
            moment.is_contiguous() if is_plain else same_order(moment, param)
        ):
            state[name] = new_like(param, dtype).copy_(moment)
    return state


def new_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for as many elements, in the parameter's order; in plain order if it has gaps."""
    is_plain = param.is_contiguous() or not is_dense(param)
    layout = torch.contiguous_format if is_plain else torch.preserve_format
    return torch.empty_like(param, dtype=dtype, memory_format=layout, requires_grad=False)


def saved_states(
    saved: Mapping[str, Any], groups: Groups
) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """The parameters of `groups` beside the states that a state dict holds for them."""
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in groups)
    for index, param in zip(ids, params, strict=False):  # torch compares the groups itself
        if saved["state"].get(index):
            yield param, saved["state"][index]


def check_saved(saved: Mapping[str, Any], groups: Groups) -> None:
    """ValueError for a state dict of something else than AdamW without `amsgrad`."""
    if any(group.get("amsgrad") for group in saved["param_groups"]):
        raise ValueError("the state dict is of AdamW(amsgrad=True), which HostAdamW does not do")
    if any(group.get("decoupled_weight_decay") is False for group in saved["param_groups"]):
        raise ValueError("the state dict is of Adam, whose weight decay is not AdamW's")
    for param, state in saved_states(saved, groups):
        for name in MOMENTS:
            shape = getattr(state.get(name), "shape", None)
            if shape != param.shape or "step" not in state:
                raise ValueError(
                    f"the state dict has {sorted(state)} with {name} of shape {shape} for a "
                    f"parameter of shape {tuple(param.shape)}: it is of another model or optimizer"
                )
