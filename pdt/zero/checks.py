"""What is refused by name before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.buckets import names_of
from pdt.comm.replicate import check_same
from pdt.flat import is_dense
from pdt.zero.bucket import ShardedBucket


def describe(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What every rank must pass alike: a line for the optimizer, for each group's settings, and
    for each parameter."""
    lines = [optimizer]
    for index, group in enumerate(groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        lines.append(f"group {index} with {settings}")
        names = names_of(group, index)
        lines += [f"{n}, {_form(p)}" for n, p in zip(names, group["params"], strict=True)]
    return lines


def check_same_or_raise(
    lines: Sequence[str],
    failed: Exception | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """The same error on every rank, when the lines differ or one of them has failed."""
    if failed is not None:
        lines = [f"{type(failed).__name__}: {failed}"]
    check_same(lines, group, device)
    if failed is not None:
        raise failed


def _form(param: Tensor) -> str:
    dtype = str(param.dtype).removeprefix("torch.")
    frozen = "" if param.requires_grad else ", frozen"
    return f"{tuple(param.shape)} {dtype}, strides {param.stride()}{frozen}"


def check_own_memory(groups: Sequence[Mapping[str, Any]]) -> None:
    """ValueError when two parameters lie in the same memory: sharding would part them."""
    named = {
        param: name
        for index, group in enumerate(groups)
        for name, param in zip(names_of(group, index), group["params"], strict=True)
        if param.numel()
    }
    spans = sorted(
        (p.device.type, p.device.index or 0, p.data_ptr(), p.data_ptr() + _extent(p), name)
        for p, name in named.items()
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


def check_in_place(names: Sequence[str], buckets: Iterable[ShardedBucket]) -> None:
    """RuntimeError when a parameter's memory is no longer the bucket's: a step would miss it."""
    for bucket in buckets:
        for i in bucket.moved():
            raise RuntimeError(
                f"the memory of {names[bucket.positions[i]]} was replaced after the optimizer was "
                "made (by model.to(...), .data = ..., another sharded optimizer?): make the "
                "optimizer last"
            )


Version = tuple[int, int]


def version(param: Tensor) -> Version:
    """Changes when the gradient is replaced or written to."""
    return (0, 0) if param.grad is None else (id(param.grad), param.grad._version)


def check_unchanged(
    names: Sequence[str], params: Sequence[Tensor], versions: Sequence[Version]
) -> None:
    """RuntimeError when a gradient has another version than when it was reduced."""
    for name, param, before in zip(names, params, versions, strict=True):
        if version(param) != before:
            raise RuntimeError(
                f"the gradient of {name} has changed since it was reduced (to be clipped?): "
                "run all backwards first, then clip, then step"
            )
