"""What a wrapper listens to: gradients that autograd accumulates, tensors that a module returns."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Listener(Protocol):
    """Whoever wants to hear."""

    def arrive(self, index: int) -> None: ...


def listen(
    listener: Listener,
    named_params: Sequence[tuple[str, nn.Parameter]],
    grad_dtype: torch.dtype | None,
    *,
    keys: Sequence[int] | None = None,
) -> Callable[[], object]:
    """Call `listener.arrive(i)` after each accumulation in the `.grad` of parameter i.

    `keys` are what they are called instead of 0, 1, 2, ... With `grad_dtype`, gradients are
    accumulated in that dtype. The hooks hold the listener only weakly: all ends when it is dropped,
    or when the function that is returned is called. Raises ValueError for a parameter that another
    listener hears already.
    """
    check_unheard(named_params)
    params = [param for _, param in named_params]
    if grad_dtype is not None:
        for param in params:
            set_grad_dtype(param, grad_dtype)
    ref = weakref.ref(listener)
    handles = [
        param.register_post_accumulate_grad_hook(partial(_arrived, ref, key))
        for key, param in zip(keys or range(len(params)), params, strict=True)
    ]
    return weakref.finalize(listener, _release, handles, params, grad_dtype)


def check_unheard(named_params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """ValueError for a parameter that a listener hears already."""
    for name, param in named_params:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            heard_by = hook.args[0]() if _is_ours(hook) else None
            if heard_by is not None:
                cls = type(heard_by)
                package = cls.__module__.rpartition(".")[0]
                raise ValueError(
                    f"the gradient of {name!r} is averaged already, by a {cls.__name__} of "
                    f"{package}: drop the wrapper or optimizer that does it first (del), or go on "
                    "with it"
                )


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _arrived


def _arrived(ref: weakref.ref[Any], key: int, _param: Tensor) -> None:
    listener = ref()
    if listener is not None:
        listener.arrive(key)


def _release(
    handles: list[Any], params: list[nn.Parameter], grad_dtype: torch.dtype | None
) -> None:
    for handle in handles:
        handle.remove()
    if grad_dtype is not None:
        for param in params:
            set_grad_dtype(param, param.dtype)


def set_grad_dtype(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Let `param` accumulate its gradient in `dtype`; one that it holds is converted."""
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    param.grad = grad if grad is None else grad.to(dtype)


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns: in nested containers and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for item in dataclasses.fields(leaf):
                yield from output_tensors(getattr(leaf, item.name))
