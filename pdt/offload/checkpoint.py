"""Activation checkpointing: keep a function's arguments, and run it again when backward comes.

Chen et al. 2016, section 4 (arXiv:1604.06174). Autograd hands each tensor that it would save to a
hook, which keeps a numbered ticket in its place. The first ticket that backward presents runs the
function once more; what it saves this time, in the same order, is what the tickets stand for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

_OUTSIDE = -1  # the number of a backward pass where there is none


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, for which the graph keeps the tensors among the arguments alone.

    Backward runs `fn` once more for the rest: with the random states of the CPU and of the
    arguments' devices as they were, so that a dropout drops the same elements (the stream outside
    does not notice), under the same autocast, and no further than the last tensor that forward
    saved. What it brings back is freed as backward uses it. Arguments and results may be anything,
    tensors in nested containers among them; checkpoints may be nested, and `fn` may checkpoint a
    module twice. Without gradients it only calls `fn`.

    `fn` must compute the same both times, and what it changes besides (a counter, the statistics of
    a batch norm) it changes twice. Backward raises RuntimeError when the tensors differ in number,
    shape, dtype or device, and when one that it needs has been changed in place.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    with saved_tensors_hooks(_Call(fn, args, kwargs).pack, _unpack):
        return fn(*args, **kwargs)


class _Ticket:
    """Stands in the graph for one tensor; holds it from the recomputation until its use."""

    __slots__ = ("__weakref__", "again", "call")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.again: tuple[Tensor, int, int] | None = None  # its version, and of which backward


def _unpack(ticket: _Ticket) -> Tensor:
    backward = torch._C._current_graph_task_id()
    if ticket.again is None or ticket.again[2] != backward:
        ticket.call.recompute(backward)
    assert ticket.again is not None  # the recomputation reached it, or has raised
    (tensor, version, _), ticket.again = ticket.again, None
    if backward == _OUTSIDE:  # somebody looks at the graph: nobody will ask for the others
        ticket.call.forget()
    if tensor._version != version:
        raise RuntimeError(
            f"{ticket.call.name} has changed in place a tensor of shape {tuple(tensor.shape)} that "
            f"backward needs (version {tensor._version}, expected {version})"
        )
    return tensor


class _Call:
    """One call of a checkpointed function: what it takes to run it again, and its tickets."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, self._form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._fn, self._kept = fn, _Kept.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._surroundings = _Surroundings(tensors)
        self._tickets: list[tuple[weakref.ref[_Ticket], tuple[Any, ...]]] = []
        self.name = f"checkpoint of {getattr(fn, '__qualname__', type(fn).__name__)}"

    def pack(self, tensor: Tensor) -> _Ticket:
        ticket = _Ticket(self)
        self._tickets.append((weakref.ref(ticket), _described(tensor)))
        return ticket

    def recompute(self, backward: int) -> None:
        """Run the function again; afterwards every ticket that still lives has its tensor."""
        args, kwargs = self._arguments()
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            tensor = tensor.detach()  # a saved result would lead to its own node, for ever
            self._bring(count, tensor, backward)
            count += 1
            if count == len(self._tickets):
                raise _Enough
            return tensor

        try:
            with self._surroundings.again(), saved_tensors_hooks(pack, lambda tensor: tensor):
                self._fn(*args, **kwargs)
        except _Enough:
            pass
        if count < len(self._tickets):
            raise RuntimeError(
                f"{self.name}: run again, it saved {count} tensors for backward, and in forward "
                f"{len(self._tickets)}; it must do the same both times"
            )
        if backward != _OUTSIDE:  # of what this backward does not use
            Variable._execution_engine.queue_callback(partial(_forget, weakref.ref(self)))

    def forget(self) -> None:
        """Free what has been brought back."""
        for reference, _ in self._tickets:
            ticket = reference()
            if ticket is not None:
                ticket.again = None

    def _bring(self, number: int, tensor: Tensor, backward: int) -> None:
        if number >= len(self._tickets):  # the function went on after _Enough
            return
        reference, described = self._tickets[number]
        if _described(tensor) != described:
            raise RuntimeError(
                f"{self.name}: run again, it saved {_text(_described(tensor))} as tensor {number} "
                f"for backward, and in forward {_text(described)}; it must do the same both times"
            )
        ticket = reference()
        if ticket is not None:
            ticket.again = tensor, tensor._version, backward

    def _arguments(self) -> Any:
        leaves = list(self._others)
        for place, tensor in zip(self._places, self._kept.saved_tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._form)


def _forget(reference: weakref.ref[_Call]) -> None:
    call = reference()
    if call is not None:
        call.forget()


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _text(described: tuple[Any, ...]) -> str:
    shape, dtype, device = described
    return f"{shape} of {dtype} on {device}"


class _Enough(BaseException):
    """Ends a recomputation; no `except Exception` of the function holds it up."""


class _Kept(torch.autograd.Function):
    """Keeps tensors as autograd keeps them: seen by outer hooks, checked for changes in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nobody computes with the anchor")


class _Surroundings:
    """The random states and the autocast that hold now, so that they can hold again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        devices = {t.device.index for t in tensors if t.is_cuda}
        if torch.cuda.is_initialized():
            devices.add(torch.cuda.current_device())
        self._devices = sorted(devices)
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(device) for device in self._devices]
        cached = torch.is_autocast_cache_enabled()
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached)
            for kind in ("cpu", *["cuda"] * bool(self._devices))
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Gradients on, and the states as they were; on leaving, those from before."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._cpu_state)
            for device, state in zip(self._devices, self._cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            for autocast in self._autocasts:
                stack.enter_context(torch.autocast(*autocast))
            stack.enter_context(torch.enable_grad())
            yield
