"""How a unit hears that its module's forward and backward begin and end.

Forward by hooks on the module. Backward by hooks on tensors: it begins with the gradient of one of
the outputs, and has ended when those of all inputs are there, since all that lies between is newer
in the graph and autograd runs what is newer first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map

from pdt.listen import output_tensors
from pdt.zero.unit import Unit

_NO_ERROR = object()


class Entry:
    """The hooks of one unit. `param_dtype`: floating-point inputs are cast to it."""

    def __init__(self, unit: Unit, param_dtype: torch.dtype | None) -> None:
        self._unit, self._param_dtype = unit, param_dtype
        self._error: object = _NO_ERROR  # that was being handled when the outermost forward began

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.begin(args, kwargs)

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Called on an exception, too, with None for the output."""
        return self.end(output, sys.exc_info()[1])

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may be called as `forward` is."""

        @functools.wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Any:
            before = sys.exc_info()[1]
            args, kwargs = self.begin(args, kwargs)
            try:
                output = method(*args, **kwargs)
            except BaseException as error:
                self.end(None, error)
                raise
            return self.end(output, before)

        return entered

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit = self._unit
        unit.depth += 1
        if unit.depth > 1:  # inside itself
            return args, kwargs
        self._error = sys.exc_info()[1]
        passes = unit.passes
        if passes.outermost is None and not _in_backward():
            passes.begin_forward(unit)
        passes.acquire(unit)
        if self._param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self._param_dtype)
        return self._watch_inputs(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs that require a gradient are replaced by views, whose gradients tell the end."""
        watched: list[Tensor] = []

        def watch(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            watched.append(value.view_as(value))
            return watched[-1]

        if kwargs or not all(isinstance(value, Tensor) for value in args):
            args, kwargs = tree_map(watch, (args, kwargs))
        else:
            args = tuple(map(watch, args))
        end = partial(self._unit.passes.end_use_in_backward, self._unit)
        if len(watched) == 1:
            watched[0].register_hook(lambda _: end())
        elif watched:
            register_multi_grad_hook(watched, lambda _: end())
        return args, kwargs

    def end(self, output: Any, error: BaseException | None) -> Any:
        """`error`: the exception that is being handled now."""
        unit, passes = self._unit, self._unit.passes
        unit.depth = max(0, unit.depth - 1)
        if unit.depth:
            return output
        failed = error is not None and error is not self._error
        self._error = _NO_ERROR
        if torch.is_grad_enabled():
            for tensor in output_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._begin_backward)
        if _in_backward():
            return output  # of a recomputation, whose backward follows
        if failed and unit is passes.outermost:
            passes.abandon_forward()
        else:
            passes.end_use_in_forward(unit)
        return output

    def _begin_backward(self, _grad: Tensor) -> None:
        self._unit.passes.begin_backward()
        self._unit.passes.acquire(self._unit)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_real else leaf

    return tree_map(cast, value)
