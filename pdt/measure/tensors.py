"""Finding the plain tensors in nested values and inside tensor subclasses."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`: itself, or those of nested lists, tuples and dicts' values."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    kind = type(value)  # compared first, for this runs for every operation under a ledger
    if kind is torch.Tensor or kind is nn.Parameter:
        found.append(value)
    elif kind is list or kind is tuple:
        for item in value:
            _collect(item, found)
    elif kind in _LEAVES:
        return
    elif isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, found)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that own memory: the local part of a DTensor, the parts of a sparse tensor."""
    kind = type(tensor)
    if kind is FakeTensor:  # a shape that torch propagates, without memory
        return []
    if kind is torch.Tensor or kind is nn.Parameter or not is_traceable_wrapper_subclass(tensor):
        return [tensor] if tensor.layout is torch.strided else _sparse_parts(tensor)
    names, _context = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # of a DTensor also its mesh
    return [plain for part in tensors_in(parts) for plain in plain_tensors(part)]


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # an opaque layout (mkldnn) shows no storage
