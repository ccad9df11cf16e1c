"""Plain data between rank and grader: what the learner's code returns may not run code by itself.

A rank lets pass only None, numbers, texts, bytes (not b""), dense tensors, and lists, tuples and
dicts of them, each of exactly that type: an object with an `__eq__` of its own never reaches a
comparison.
The grader reads them with torch's restricted unpickler.
"""

from __future__ import annotations

import io
from typing import Any

import torch

SCALARS = (type(None), bool, int, float, complex, str, bytes)
TENSORS = (torch.Tensor, torch.nn.Parameter)


def dumps(value: Any) -> bytes:
    """Bytes of a plain value; TypeError, with the name of its type, for any other."""
    buffer = io.BytesIO()
    torch.save(to_plain(value), buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The plain value; whatever else the bytes may hold raises an error and is not run."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def to_plain(value: Any) -> Any:
    """A copy made of exact built-in types and of dense tensors on the CPU."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in TENSORS:
        return _dense(value)
    if kind is torch.Size:
        return tuple(int(n) for n in value)
    if kind in (list, tuple):
        return kind(to_plain(item) for item in value)
    if kind is dict:
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} where a number, a text, a tensor, or a list, tuple "
        "or dict of these is expected"
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} where a dense one is expected")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device, without values")
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
    )
