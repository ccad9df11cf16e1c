"""Activations on the host: what autograd saves leaves the device, and returns for backward.

Rhu et al. 2016, section III (arXiv:1602.08124) moved a network's feature maps so. A hook sees each
tensor that is saved; a storage leaves once, whatever views of it are saved, and a view remembers
its geometry. In backward a storage comes back before it is asked for, in reverse order.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from pdt.offload.away import OUTSIDE, Away, SavedView, check_version
from pdt.offload.bus import Bus, Transfer
from pdt.offload.host_buffers import HostBuffers


def offload_activations(
    bus: Bus,
    *,
    model: nn.Module | None = None,
    min_nbytes: int = 2**20,
    prefetch: int = 2,
    window: int = 4,
) -> ActivationOffload:
    """A context: what the graph built inside keeps for backward is on the host until then.

    >>> offload = offload_activations(bus)
    >>> for batch in batches:
    ...     with offload:
    ...         loss = model(batch)
    ...     loss.backward()

    Enter the same one in every step: its host buffers serve again, so that after the first step
    none is allocated. Storages of `min_nbytes` or more leave over `bus`, each once. At most
    `window` of them are under way and still on the device; forward waits for the oldest before one
    more. Backward asks for `prefetch` storages ahead of the one in use; those that it meets before
    they have left are used where they are. What returned is freed with its last use.

    What stays: parameters and their views, the parameters and buffers of `model` whatever is saved
    of them, tensors of another device than the bus's, subclasses and tensors that are not strided.
    A tensor that has been changed in place since it was saved raises RuntimeError in backward, as
    autograd would. An exception inside the context waits for what is under way. Forward and
    backward run on one stream. Raises ValueError for counts that make no sense.
    """
    if min_nbytes < 0 or prefetch < 0 or window < 1:
        raise ValueError(
            f"min_nbytes={min_nbytes}, prefetch={prefetch}, window={window}: the first two are 0 "
            "or more, and a window is 1 or more"
        )
    return ActivationOffload(bus, model, min_nbytes, prefetch, window)


class ActivationOffload:
    """What `offload_activations` returns; `host_tensors` are the buffers that it holds now."""

    def __init__(
        self, bus: Bus, model: nn.Module | None, min_nbytes: int, prefetch: int, window: int
    ) -> None:
        self.bus = bus
        self._model, self._min_nbytes = model, min_nbytes
        self._prefetch, self._window = prefetch, window
        self._device = torch.empty(0, device=getattr(bus, "device", "cpu")).device
        self._buffers = HostBuffers(bus)
        self._entered: list[saved_tensors_hooks] = []
        self._own: set[int] = set()  # storages of the model
        self._by_storage: weakref.WeakValueDictionary[int, Away] = weakref.WeakValueDictionary()
        self._all: weakref.WeakSet[Away] = weakref.WeakSet()
        self._latest: weakref.ref[Away] | None = None
        self._leaving: deque[tuple[Transfer, weakref.ref[Away]]] = deque()
        self._backward = OUTSIDE  # the pass whose end will be told

    @property
    def host_tensors(self) -> list[Tensor]:
        """Every buffer on the host: in use, or kept for the next step."""
        return self._buffers.tensors

    def __enter__(self) -> ActivationOffload:
        tensors = [] if self._model is None else [*self._model.parameters(), *self._model.buffers()]
        self._own = {id(tensor.untyped_storage()) for tensor in tensors if _is_plain(tensor)}
        self._latest = None
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)
        if exc_info[0] is not None:
            while self._leaving:
                self._let_go_of_oldest()

    def _pack(self, tensor: Tensor) -> Any:
        """A view of a storage that leaves, or (tensor, version) of one that stays."""
        if not self._leaves(tensor):
            version = None if tensor.is_inference() else tensor._version
            return tensor.detach() if tensor.grad_fn is not None else tensor, version
        storage = tensor.untyped_storage()
        away = self._by_storage.get(id(storage))
        if away is None or not away.holds(storage, tensor._version):
            away = self._send(tensor)
        return SavedView(away, tensor)

    def _leaves(self, tensor: Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.device != self._device:
            return False
        if not _is_plain(tensor) or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= max(self._min_nbytes, 1) and id(storage) not in self._own

    def _send(self, tensor: Tensor) -> Away:
        while self._leaving and (
            self._leaving[0][0].is_completed() or len(self._leaving) >= self._window
        ):
            self._let_go_of_oldest()
        away = Away(tensor, self.bus, self._buffers, before=self._latest)
        self._leaving.append((away.sent, weakref.ref(away)))
        self._by_storage[id(tensor.untyped_storage())] = away
        self._all.add(away)
        self._latest = weakref.ref(away)
        return away

    def _let_go_of_oldest(self) -> None:
        sent, reference = self._leaving.popleft()
        sent.finish()
        away = reference()
        if away is not None:
            away.source = None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            tensor, version = packed
            check_version(tensor, version, tuple(tensor.shape))
            return tensor
        packed.check()
        backward = torch._C._current_graph_task_id()
        if backward not in (OUTSIDE, self._backward):
            self._backward = backward
            Variable._execution_engine.queue_callback(self._end_of_backward)
        away: Away = packed.away
        storage = away.use(backward)
        if backward == OUTSIDE:  # somebody looks at the graph
            away.forget()
        else:
            self._fetch_before(away, backward)
        return packed.of(storage)

    def _fetch_before(self, away: Away, backward: int) -> None:
        """Begin to bring back the storages that left before it."""
        ahead, before = 0, away.before_it()
        while before is not None and ahead < self._prefetch:
            if before.is_wanted(backward):
                before.fetch()
                ahead += 1
            before = before.before_it()

    def _end_of_backward(self) -> None:
        """What has come back and is still there belongs to a graph that is kept."""
        self._backward = OUTSIDE
        for away in self._all:
            away.forget()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
