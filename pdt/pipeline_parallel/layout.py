"""What a message between two stages looks like: one tensor or a tuple of tensors and None.

Pure. A layout is learned from the first message, which a header of fixed size goes ahead of, and
holds for all micro-batches whose inputs look the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_NBYTES = 2048
Values = Tensor | tuple[Tensor | None, ...]


class Part(NamedTuple):
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}{grad}"


class Layout(NamedTuple):
    """All of a message; `parts` has None where the tuple has None."""

    is_tuple: bool
    parts: tuple[Part | None, ...]

    def __str__(self) -> str:
        inner = ", ".join(str(part) for part in self.parts)
        return f"({inner})" if self.is_tuple else inner

    @property
    def has_grad(self) -> bool:
        return any(part is not None and part.requires_grad for part in self.parts)


def tensors_of(values: Values) -> tuple[Tensor | None, ...]:
    """A lone tensor as a tuple of one."""
    return values if isinstance(values, tuple) else (values,)


def message_layout(values: object) -> Layout:
    """TypeError for what is neither a tensor nor a tuple of tensors and None."""
    items = values if isinstance(values, tuple) else (values,)
    if not items or not all(isinstance(item, Tensor | None) for item in items) or values is None:
        raise TypeError(
            f"a stage must return a tensor, or a tuple of tensors and None, not {_kinds(values)}"
        )
    parts = [None if t is None else Part(tuple(t.shape), t.dtype, t.requires_grad) for t in items]
    return Layout(isinstance(values, tuple), tuple(parts))


def _kinds(values: object) -> str:
    if isinstance(values, tuple):
        return f"({', '.join(type(item).__name__ for item in values)})"
    return type(values).__name__


def pack(layout: Layout) -> Tensor:
    """The header: uint8 (HEADER_NBYTES,). ValueError for a layout that does not fit."""
    parts = [p and [list(p.shape), str(p.dtype)[6:], p.requires_grad] for p in layout.parts]
    text = json.dumps([layout.is_tuple, parts], separators=(",", ":")).encode()
    if len(text) > HEADER_NBYTES:
        raise ValueError(
            f"a message of {len(parts)} tensors needs a header of {len(text)} bytes and there are "
            f"{HEADER_NBYTES}: stack some of them"
        )
    return torch.tensor(list(text.ljust(HEADER_NBYTES)), dtype=torch.uint8)


def unpack(header: Tensor) -> Layout:
    """What `pack` was given."""
    is_tuple, parts = json.loads(bytes(header.tolist()))
    return Layout(
        is_tuple,
        tuple(p and Part(tuple(p[0]), getattr(torch, p[1]), p[2]) for p in parts),
    )


def key_of(inputs: Sequence[Tensor | None], mode: str) -> int:
    """A number below 2**62 for all micro-batches that look alike and are run in the same mode."""
    text = f"{mode} {message_layout(tuple(inputs))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
