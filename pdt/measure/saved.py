"""What autograd keeps for backward, seen through its saved-tensor hooks."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pdt.measure.tensors import plain_tensors, tensors_in


class Kept:
    """Stands in the graph for a saved tensor; calls `released` when the graph lets go of it.

    It holds the tensor detached, since a saved output that led back to its own node would never be
    freed, and it repeats autograd's check for in-place changes, which hooks would switch off.
    """

    __slots__ = ("_released", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, released: Callable[[], Any]) -> None:
        self._released = released
        self._version = None if tensor.is_inference() else tensor._version
        self._tensor = tensor.detach() if tensor.requires_grad else tensor

    def tensor(self) -> torch.Tensor:
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self._tensor.shape)} is at version "
                f"{self._tensor._version}, expected version {self._version}"
            )
        return self._tensor

    def __del__(self) -> None:
        self._tensor = None  # type: ignore[assignment]  # first, so that its death is seen as one
        self._released()


@contextmanager
def watch_saved(keep: Callable[[torch.Tensor], Callable[[], Any]]) -> Iterator[None]:
    """Call `keep(tensor)` for all that autograd saves; it returns what to call on release.

    Only the innermost hooks apply, so hooks of others (checkpointing, offloading, entered before
    or inside) are left to work, and what counts are the tensors that they keep, while these live.
    """
    push = torch._C._autograd._push_saved_tensors_default_hooks
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    followed = _Followed(keep)

    def enter(hooks: saved_tensors_hooks) -> None:
        push(followed.packed_by(hooks.pack_hook), hooks.unpack_hook)

    original_enter = saved_tensors_hooks.__enter__
    if outer is None:
        push(lambda tensor: Kept(tensor, keep(tensor)), lambda kept: kept.tensor())
    else:
        push(followed.packed_by(outer[0]), outer[1])
    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = original_enter  # type: ignore[method-assign]
        torch._C._autograd._pop_saved_tensors_default_hooks()


class _Followed:
    """The tensors that others' hooks keep, each until its own death."""

    def __init__(self, keep: Callable[[torch.Tensor], Callable[[], Any]]) -> None:
        self._keep = keep
        self._deaths: dict[int, weakref.ref[torch.Tensor]] = {}

    def packed_by(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def pack_and_follow(tensor: torch.Tensor) -> Any:
            try:
                packed = pack(tensor)
            except BaseException:
                # checkpointing keeps its last tensor and then ends the recomputation by raising
                _when_backward_ends(self._keep(tensor))
                raise
            for part in tensors_in(packed):
                self._follow(part)
            return packed

        return pack_and_follow

    def _follow(self, tensor: torch.Tensor) -> None:
        released = self._keep(tensor)

        def died(ref: weakref.ref[torch.Tensor]) -> None:
            del self._deaths[id(ref)]
            released()

        ref = weakref.ref(tensor, died)
        self._deaths[id(ref)] = ref


def _when_backward_ends(released: Callable[[], Any]) -> None:
    if torch._C._current_graph_task_id() == -1:
        released()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(released)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for backward. `nbytes` is its whole storage's, 0 where one before shares it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    storage_nbytes: int


class SavedActivations:
    """A context that knows what the graph built inside it keeps for backward, at any moment.

    Each storage counts once and whole, however many views of it are saved. Parameters do not
    count: tensors that are an `nn.Parameter` or a view of one, and the parameters of `model`.
    Small things do: layer norm's statistics, dropout masks, indices. Works on the meta device too,
    so a block of the paper's size can be counted without the memory for it. A context is used once.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        parameters = [] if model is None else list(model.parameters())
        self._parameters = {
            id(part.untyped_storage()) for tensor in parameters for part in plain_tensors(tensor)
        }
        self._saved: dict[int, list[_Part]] = {}  # by order of saving, while the graph holds it
        self._numbers = itertools.count()
        self._hooks = watch_saved(self._keep)

    def __enter__(self) -> "SavedActivations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.__exit__(*exc_info)

    @property
    def tensors(self) -> list[SavedTensor]:
        """What is kept now, in the order of saving."""
        listed: list[SavedTensor] = []
        seen: set[int] = set()
        for part in (part for parts in list(self._saved.values()) for part in parts):
            storage = part.storage()
            if storage is not None:
                nbytes = storage.nbytes()
                own_nbytes = 0 if id(storage) in seen else nbytes
                listed.append(SavedTensor(part.shape, part.dtype, own_nbytes, nbytes))
                seen.add(id(storage))
        return listed

    @property
    def nbytes(self) -> int:
        """Bytes that the graph keeps now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def _keep(self, tensor: torch.Tensor) -> Callable[[], Any]:
        number = next(self._numbers)
        self._saved[number] = [
            _Part(tuple(part.shape), part.dtype, weakref.ref(part.untyped_storage()))
            for part in plain_tensors(tensor)
            if not self._is_parameter(part)
        ]
        return partial(self._saved.pop, number)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return (
            isinstance(tensor, nn.Parameter)
            or isinstance(tensor._base, nn.Parameter)
            or id(tensor.untyped_storage()) in self._parameters
        )


@dataclass(frozen=True)
class _Part:
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: "weakref.ref[torch.UntypedStorage]"


def saved_activations(
    fn: Callable[..., Any], *args: Any, model: nn.Module | None = None
) -> list[SavedTensor]:
    """Call `fn(*args)` and list what its graph keeps for backward; see `SavedActivations`.

    `sum(tensor.nbytes for tensor in saved_activations(block, x))` is the activation memory of
    `block` as Korthikanti et al. 2022, section 4 (arXiv:2205.05198) counts it, and besides the two
    statistics per token of each layer norm, which the paper leaves out as small.
    """
    with SavedActivations(model) as saved:
        output = fn(*args)
        listed = saved.tensors
        del output  # it holds the graph, so not before the list is taken
    return listed
