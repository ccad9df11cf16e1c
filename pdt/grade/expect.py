"""Helpers for properties: compare what was seen, and say it in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdt.comm.cost import LAWS
from pdt.grade.exercise import Run, Wrong
from pdt.measure.table import text_table

SHOWN = 6  # elements of a tensor that a report shows


def expect(holds: bool, expected: object, seen: object) -> None:
    """Raise `Wrong` unless `holds`."""
    if holds is not True:
        raise Wrong(expected, seen)


def expect_int(seen: Any, expected: int, what: str = "the result") -> None:
    """`seen` is exactly this whole number (True is not 1, and 1.0 is not)."""
    if type(seen) is not int:
        raise Wrong(f"{what} is a whole number (int)", _kind(seen))
    expect(seen == expected, f"{what} is {expected:,}", f"{seen:,}")


def expect_close(seen: Any, expected: float, rel: float, what: str = "the result") -> None:
    """`seen` is an int or a float within `rel` (a share of 1) of the expected number."""
    if type(seen) not in (int, float):
        raise Wrong(f"{what} is a number", _kind(seen))
    near = abs(seen - expected) <= rel * abs(expected)
    expect(near, f"{what} is {expected:.6g} within {rel:.2%}", f"{seen:.6g}")


def expect_tensor(
    seen: Any, expected: torch.Tensor, what: str, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """`seen` is a tensor of the same shape, dtype and values, exactly if no tolerance is given."""
    if type(seen) is not torch.Tensor:
        raise Wrong(f"{what} is a tensor", _kind(seen))
    if seen.dtype != expected.dtype:
        raise Wrong(f"{what} has {expected.dtype}", seen.dtype)
    if seen.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(expected.shape)}", tuple(seen.shape))
    if not _same_values(seen, expected, rtol, atol):
        raise Wrong(f"{what} holds {_values(expected)}", _values(seen))


def _same_values(seen: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(seen, expected)
    return torch.allclose(seen, expected, rtol=rtol, atol=atol, equal_nan=True)


def expect_unchanged(run: Run, position: int) -> None:
    """No rank changed its argument number `position`, a tensor."""
    for rank, (seen, given) in enumerate(zip(run.ranks, run.inputs, strict=True)):
        expect_tensor(seen.args[position], given[position], f"argument {position} of rank {rank}")


def expect_ops(run: Run, *allowed: str) -> None:
    """Every call on every rank is one of `allowed`, such as "send", "recv"."""
    unknown = [op for op in allowed if op not in LAWS]
    if unknown:
        raise ValueError(f"{unknown} are no operations of the meter: {', '.join(LAWS)}")
    for rank, seen in enumerate(run.ranks):
        for record in seen.records:
            what = f"{record.label} on rank {rank}"
            expect(record.op in allowed, f"only {' and '.join(allowed)}", what)


def expect_waited(run: Run) -> None:
    """When a rank returns, it has waited for every message that it sent or received."""
    for rank, seen in enumerate(run.ranks):
        pending = seen.pending
        labels = ", ".join(record.label for record in pending[:3])
        expect(not pending, "every message waited for", f"rank {rank} left {labels}")


def expect_sent(run: Run, at_least: Sequence[float], at_most: Sequence[float]) -> None:
    """Each rank sends between these numbers of bytes, given by rank, by the meter."""
    for rank, (seen, low, high) in enumerate(zip(run.ranks, at_least, at_most, strict=True)):
        bounds = f"{high:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        in_bounds = low <= seen.wire_nbytes <= high
        expect(in_bounds, f"rank {rank} sends {bounds} bytes", f"{seen.wire_nbytes:,.0f}")


def traffic(run: Run) -> str:
    """A picture of the messages: the bytes that each rank sent to each other."""
    n = run.world_size
    rows = []
    for rank, seen in enumerate(run.ranks):
        sent = [0] * n
        for record in seen.records:
            if record.op == "send" and record.peer is not None:
                sent[record.peer] += record.nbytes
        cells = [f"{nbytes:,}" if nbytes else "." for nbytes in sent]
        rows.append((f"rank {rank}", *cells, f"{sum(sent):,}"))
    return text_table(("bytes from", *(f"to {peer}" for peer in range(n)), "together"), rows)


def _kind(value: Any) -> str:
    forgotten = " (is a `return` missing?)" if value is None else ""
    shown = repr(value) if type(value) in (bool, int, float, str) else ""
    return f"{type(value).__name__} {shown[:40]}".rstrip() + forgotten


def _values(tensor: torch.Tensor) -> str:
    flat = tensor.flatten()[:SHOWN].tolist()
    more = ", ..." if tensor.numel() > SHOWN else ""
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in flat]
    return f"[{', '.join(shown)}{more}]"
