"""What is refused by name before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from pdt.flat import is_dense


def name_of(group: Mapping[str, Any], group_index: int, i: int) -> str:
    """A parameter's name, if the optimizer was given names, or where it is in the list."""
    names = group.get("param_names")
    return names[i] if names else f"parameter {i} of group {group_index}"


def describe(
    group: Mapping[str, Any], names: Sequence[str], params: Sequence[nn.Parameter]
) -> list[str]:
    """One line for the group's settings and one a parameter: what every rank must pass alike."""
    settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    lines = [f"{name}, {_form(p)}" for name, p in zip(names, params, strict=True)]
    return [f"settings {settings}", *lines]


def _form(param: Tensor) -> str:
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{tuple(param.shape)} {dtype}, strides {param.stride()}"


def check_own_memory(names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
    """ValueError when two parameters lie in the same memory: sharding would part them."""
    spans = sorted(
        (p.device.type, p.device.index or 0, p.data_ptr(), p.data_ptr() + _extent(p), name)
        for name, p in zip(names, params, strict=True)
        if p.numel()
    )
    for (*place, _, end, name), (*other_place, begin, _, other) in pairwise(spans):
        if place == other_place and begin < end:
            raise ValueError(
                f"{name} and {other} are two parameters in the same memory: tie them by assigning "
                "the same nn.Parameter to both modules"
            )


def _extent(param: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if is_dense(param):
        return param.nbytes
    last = sum((n - 1) * stride for n, stride in zip(param.shape, param.stride(), strict=True))
    return (last + 1) * param.element_size()
