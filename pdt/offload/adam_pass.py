"""AdamW in one pass over memory, with what stands before and behind it: unscale, clip, cast.

The compiled kernel reads each number once and writes it once. Where there is none, torch does the
same chunk by chunk: at the pace of its fused AdamW with the passes around it, but without changing
the gradients and without room for another copy of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pdt.flat import is_dense
from pdt.offload import kernel
from pdt.offload.adam_steps import DEFAULT, Settings, Tensors, adamw_fused

CHUNK_NUMEL = 2**20  # many times longer than starting the threads of four operations takes
DTYPES = {*kernel.KINDS, torch.float64}
Lists = tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]  # as OTHERS, params first
OTHERS = ("grads", "exp_avgs", "exp_avg_sqs", "copies")


@torch.no_grad()
def adamw_one_pass(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    settings: Settings = DEFAULT,
    *,
    grad_scale: float = 1.0,
    copies: list[Tensor | None] | None = None,
) -> None:
    """One pass that also divides gradients by `grad_scale` and fills `copies` with the new params.

    To unscale by s and to clip by a coefficient c, divide by s / c. Parameters, gradients and
    copies are float32, bfloat16 or float16; the moments are float32, and so is all arithmetic: a
    result is rounded once, to nearest even. A parameter's tensors must have its shape and strides,
    without gaps (ValueError). Runs the compiled kernel where there is one and it knows the dtypes,
    else `adamw_in_chunks` (so for float64, with moments of float64); the two agree to about 1e-6.
    The kernel's bits do not depend on the number of threads, nor on how the elements are divided
    among tensors.
    """
    tensors = (params, grads, exp_avgs, exp_avg_sqs, copies or [None] * len(params))
    _check(*tensors)
    run_one_pass(tensors, step, settings, grad_scale)


@torch.no_grad()
def adamw_in_chunks(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    settings: Settings = DEFAULT,
    *,
    grad_scale: float = 1.0,
    copies: list[Tensor | None] | None = None,
) -> None:
    """What `adamw_one_pass` does, by torch alone, in three passes over each chunk."""
    tensors = (params, grads, exp_avgs, exp_avg_sqs, copies or [None] * len(params))
    _check(*tensors)
    run_in_chunks(tensors, step, settings, grad_scale)


def run_one_pass(tensors: Lists, step: int, settings: Settings, grad_scale: float) -> None:
    """`adamw_one_pass` of tensors that are known to fit."""
    rule, rows = _rule(settings, step, grad_scale), None
    if kernel.available():
        rows = _rows(tensors, kernel.get().kinds)
    if rows is None:
        run_in_chunks(tensors, step, settings, grad_scale)
    else:
        kernel.get().adamw(rows, rule)
        _mark_written(tensors)


def run_in_chunks(tensors: Lists, step: int, settings: Settings, grad_scale: float) -> None:
    """`adamw_in_chunks` of tensors that are known to fit."""
    factor = 1 / _positive(grad_scale)
    longest = min(CHUNK_NUMEL, sum(p.numel() for p in tensors[0]))
    room = {dtype: torch.empty(2, longest, dtype=dtype) for dtype in {m.dtype for m in tensors[2]}}
    for batch in _batches(tensors):
        params, grads, exp_avgs, exp_avg_sqs, copies = map(list, zip(*batch, strict=True))
        for_grads, for_params = room[exp_avgs[0].dtype]
        new = _widened(params, 1.0, for_params)
        grads = _widened(grads, factor, for_grads)
        adamw_fused(new, grads, exp_avgs, exp_avg_sqs, step, settings)
        for result, *targets in zip(new, params, copies, strict=True):
            for target in targets:
                if target is not None and target is not result:
                    target.copy_(result)
    _mark_written(tensors)


def _batches(tensors: Lists) -> Iterator[list[list[Any]]]:
    """Chunks of one or more tensors, `CHUNK_NUMEL` elements at most; moments are of one dtype."""
    batch: list[list[Any]] = []
    numel = 0
    for each in zip(*tensors, strict=True):
        for chunk in _chunks(*each):
            numel += chunk[0].numel()
            if batch and (numel > CHUNK_NUMEL or chunk[2].dtype != batch[0][2].dtype):
                yield batch
                batch, numel = [], chunk[0].numel()
            batch.append(chunk)
    if batch:
        yield batch


def _chunks(*tensors: Tensor | None) -> Iterator[list[Any]]:
    """The same chunk of each, flat in the order of memory; None stays None."""
    numel = max(0 if t is None else t.numel() for t in tensors)
    flat = [t if t is None else t.as_strided((numel,), (1,)) for t in tensors]
    for start in range(0, numel, CHUNK_NUMEL):
        yield [t if t is None else t[start : start + CHUNK_NUMEL] for t in flat]


def _widened(chunks: list[Tensor], factor: float, room: Tensor) -> list[Tensor]:
    """The chunks times factor in the dtype of `room`, and in it unless they are that already."""
    if factor == 1 and all(chunk.dtype == room.dtype for chunk in chunks):
        return chunks
    numels = [chunk.numel() for chunk in chunks]
    found = list(room[: sum(numels)].split(numels))
    for chunk, wide in zip(chunks, found, strict=True):
        if chunk.dtype == wide.dtype:
            torch.mul(chunk, factor, out=wide)
        else:
            wide.copy_(chunk).mul_(factor)
    return found


def _mark_written(tensors: Lists) -> None:
    """A graph that saved one of these is valid no more: autograd sees neither C nor fused steps."""
    params, *_, copies = tensors
    written = [tensor for tensor in (*params, *copies) if tensor is not None]
    torch.autograd.graph.increment_version(written)


def _rule(settings: Settings, step: int, grad_scale: float) -> kernel.Rule:
    step_size, root2 = settings.biases(step)
    factor = (-1 if settings.maximize else 1) / _positive(grad_scale)
    weight1, weight2 = (1 - beta for beta in settings.betas)
    decay, beta2 = 1 - settings.lr * settings.weight_decay, settings.betas[1]
    return kernel.Rule(factor, decay, weight1, beta2, weight2, root2, settings.eps, step_size)


def _positive(grad_scale: float) -> float:
    if not 0 < grad_scale < math.inf:
        raise ValueError(f"grad_scale={grad_scale}: gradients are divided by it, so it must be > 0")
    return grad_scale


def _rows(tensors: Lists, kinds: dict[torch.dtype, int]) -> list[int] | None:
    """The tensors as adam.c's rows, one behind the other; None if it lacks a dtype."""
    rows: list[int] = []
    try:
        for p, g, m, v, copy in zip(*tensors, strict=True):
            where = (p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr())
            place, kind = (0, 0) if copy is None else (copy.data_ptr(), kinds[copy.dtype])
            if not all(where) and p.numel():
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no memory: {type(p)}")
            rows += (*where, place, p.numel(), kinds[p.dtype], kinds[g.dtype], kind)
    except KeyError:
        return None
    return rows


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    if a.stride() == b.stride():
        return True
    dims = zip(a.stride(), b.stride(), a.shape, strict=True)
    return a.numel() == 0 or all(left == right for left, right, n in dims if n != 1)


def _check(*lists: Sequence[Tensor | None]) -> None:
    """Raises ValueError for tensors that do not fit."""
    for i, (p, *others) in enumerate(zip(*lists, strict=True)):
        if p is None or p.device.type != "cpu" or not (p.is_contiguous() or is_dense(p)):
            raise ValueError(f"params[{i}] must be on the CPU, without gaps: {_describe(p)}")
        if p.dtype not in DTYPES:
            raise ValueError(f"params[{i}] is {p.dtype}, but AdamW on the host knows {DTYPES}")
        moment = torch.float64 if p.dtype == torch.float64 else torch.float32
        for name, tensor in zip(OTHERS, others, strict=True):
            known = {moment} if name.startswith("exp") else DTYPES
            if not ((tensor is None and name == "copies") or _fits(p, tensor, known)):
                raise ValueError(
                    f"{name}[{i}] is {_describe(tensor)}, but must be one of {known} with the "
                    f"shape and strides of params[{i}]: {_describe(p)}"
                )


def _fits(p: Tensor, tensor: Tensor | None, known: set[torch.dtype]) -> bool:
    if tensor is None or tensor.device != p.device or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in known and tensor.shape == p.shape and same_order(tensor, p)


def _describe(tensor: Tensor | None) -> str:
    if tensor is None or tensor.layout is not torch.strided:
        return "None" if tensor is None else f"{tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
