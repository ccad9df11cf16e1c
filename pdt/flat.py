"""Many tensors as one: views into a flat buffer, shaped and strided like what they stand for.

Pure: no process group. A collective on the flat buffer moves all of them by one call. In n equal
shards, the buffer is what n ranks divide among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dims.

    True of contiguous, transposed and channels_last tensors, false of slices and expansions.
    """
    dims = [(stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
    expected = 1
    for stride, n in sorted(dims):
        if stride != expected:
            return tensor.numel() == 0
        expected *= n
    return True


def view_like(flat: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """The elements of 1-D `flat` from `offset` on, in the shape of `tensor`.

    The strides are the tensor's own where it is dense, so that a copy between the two runs through
    memory in order (a gradient has its parameter's strides); else the view is contiguous. Raises
    ValueError where `flat` has gaps or ends too soon: the view would show memory of something else.
    """
    end = offset + tensor.numel()
    if not 0 <= offset <= end <= flat.numel() or not flat.is_contiguous():
        raise ValueError(
            f"elements {offset} to {end} are wanted, but flat has {flat.numel()}, strides "
            f"{flat.stride()}: it must hold them all, without gaps"
        )
    part = flat[offset:end]
    if is_dense(tensor):
        return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
    return part.view(tensor.shape)


def offsets(numels: Iterable[int]) -> list[int]:
    """Where each part begins when parts of these sizes lie one behind the other, and the end."""
    ends = [0]
    for numel in numels:
        ends.append(ends[-1] + numel)
    return ends


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new 1-D tensor with the elements of all, one tensor behind the other.

    All must have one dtype and device (ValueError names the first that differs). A dense tensor's
    elements come in the order of its memory, so `unflatten` into like tensors is its inverse.
    """
    if not tensors:
        raise ValueError("flatten needs one tensor or more")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"tensor {i} is {tensor.dtype} on {tensor.device}, tensor 0 is {first.dtype} on "
                f"{first.device}: flatten each dtype and device by itself"
            )
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=first.dtype, device=first.device)
    for view, tensor in zip(unflatten(flat, tensors), tensors, strict=True):
        view.copy_(tensor)
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into `flat`, one in the shape of each tensor in `like`; together they fill it.

    Raises ValueError when their elements are not as many as those of `flat`.
    """
    *starts, end = offsets(tensor.numel() for tensor in like)
    if flat.dim() != 1 or flat.numel() != end:
        raise ValueError(f"{end} elements do not fill a flat tensor of shape {tuple(flat.shape)}")
    return [view_like(flat, start, tensor) for start, tensor in zip(starts, like, strict=True)]


@dataclass(frozen=True)
class Piece:
    """What one shard holds of one tensor: the elements [start, stop) of tensor `index`, in the
    order of its memory, from `offset` of the shard on."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def in_shard(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class ShardLayout:
    """Tensors of `numels` elements one behind the other, and padding, as `n` equal shards.

    The padding is at the end: at most n-1 elements, in the last shards. With more shards than
    elements some hold padding alone.
    """

    numels: tuple[int, ...]
    n: int

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins, and the end of the last one, where the padding begins."""
        return offsets(self.numels)

    @property
    def shard_numel(self) -> int:
        return -(-self.offsets[-1] // self.n)

    @property
    def padded_numel(self) -> int:
        return self.n * self.shard_numel

    def pieces(self, rank: int) -> list[Piece]:
        """What shard `rank` holds of each tensor, without padding and without empty pieces."""
        first = rank * self.shard_numel
        last = first + self.shard_numel
        found = []
        for index, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                found.append(Piece(index, start - begin, stop - begin, start - first))
        return found
