"""The tensors of a call as flat memory, and as words that the ranks can compare (pure)."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from pdt.comm.shm.work import Steps

Tensors = list[torch.Tensor]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a contiguous 1-D tensor: a view if possible, else a copy. Raises ValueError
    for a tensor that is not dense or not in the CPU's memory."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor on {tensor.device} with layout {tensor.layout}: the shared-memory backend "
            "takes dense CPU tensors; move it with .cpu() or use another backend"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous().view(-1)


class Outputs:
    """Flat memory of one call, held until `after` has ended: its steps know only addresses.

    `after` brings results to the tensors that have no flat view.
    """

    def __init__(self) -> None:
        self._held: Tensors = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like `flat`, for what is only read: the caller may drop `tensor` while the call runs."""
        self._held.append(flat(tensor))
        return self._held[-1]

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like `flat`; what is written there reaches `tensor` when `after` ends."""
        memory = self.source(tensor)
        if memory.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, memory))
        return memory

    def after(self, steps: Iterable[Steps]) -> Steps:
        """Run `steps` one after the other, then copy what has to be copied."""
        for each in steps:
            yield from each
        for tensor, memory in self._copies:
            tensor.detach().copy_(memory.view(tensor.shape))


def listed(tensors: Tensors | torch.Tensor) -> Tensors:
    """A list of tensors, of which torch lets one stand alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def describe(tensors: Tensors | torch.Tensor) -> str:
    """Elements and dtype: `6 float32`, or `[1, 2] float32` for several."""
    if isinstance(tensors, torch.Tensor):
        return f"{tensors.numel()} {_name(tensors.dtype)}"
    numels = [tensor.numel() for tensor in tensors]
    return f"{numels} {'/'.join(sorted({_name(tensor.dtype) for tensor in tensors}))}"


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_equal(ins: Tensors, outs: Tensors) -> None:
    """ValueError unless `ins` and `outs` pair in elements and dtype."""
    if [(t.numel(), t.dtype) for t in ins] != [(t.numel(), t.dtype) for t in outs]:
        raise ValueError(f"inputs of {describe(ins)} do not fit outputs of {describe(outs)}")


def cut(
    memory: torch.Tensor, num_parts: int, splits: Sequence[int] = (), num_rows: int | None = None
) -> Tensors:
    """A flat tensor in `num_parts` parts: of `splits` rows each out of `num_rows`, or all equal."""
    num_rows = memory.numel() if num_rows is None else num_rows
    sizes = list(splits) or [num_rows // num_parts] * num_parts
    if len(sizes) != num_parts or sum(sizes) != num_rows or min(sizes) < 0:
        how = f"by {list(splits)}" if splits else "equally"
        raise ValueError(f"{num_rows} rows cannot be divided {how} among {num_parts} ranks")
    row_numel = memory.numel() // num_rows if num_rows else 0
    return list(memory.split([size * row_numel for size in sizes]))


def parts(
    tensors: Tensors | torch.Tensor, num_parts: int, flatten: Callable[..., torch.Tensor]
) -> Tensors:
    """One flat tensor per rank, from a list of them or from one tensor that is cut equally."""
    if isinstance(tensors, torch.Tensor):
        return cut(flatten(tensors), num_parts)
    if len(tensors) != num_parts:
        raise ValueError(f"a list of {len(tensors)} tensors for {num_parts} ranks")
    return [flatten(tensor) for tensor in tensors]
