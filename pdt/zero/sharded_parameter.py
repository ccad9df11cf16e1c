"""What a parameter is while its rank holds a piece of it: an optimizer may step it, a layer not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_utilities

ADVICE = (
    "each rank holds a piece of it, outside of its unit's forward and backward: use it in the "
    "forward of the module that was sharded, in a method that is named to "
    "register_forward_method(module, name), or inside gathered(module)"
)


class ShardedParameter(nn.Parameter):
    """A parameter's class from `fully_shard` on, but for the time in which it is whole.

    The object stays the same: its class and its data are switched. It is 1-D, perhaps empty, with
    a gradient of the same form. What builds a graph on it is refused: the piece would be taken for
    the whole, silently where the shapes allow it.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            result = _run(func, types, args, kwargs or {})
        except (RuntimeError, IndexError, ValueError) as error:
            name = _name(args, kwargs)
            raise RuntimeError(f"{error} [{name} is sharded: {ADVICE}]") from error
        if torch.is_grad_enabled() and (_has_graph(result) or func in _GRADIENTS):
            raise RuntimeError(f"{_name(args, kwargs)} is sharded: {ADVICE}")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        raise RuntimeError(f"{_name((self,), None)} is sharded: copy the module before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{_name((self,), None)} is sharded: save module.state_dict() inside gathered(module), "
            "with its tensors cloned"
        )


# On a GPU, optimizers and clipping take their fast path for the types that are listed there
for _types in (_of_optimizers, _of_utilities):
    _types.append(ShardedParameter)  # type: ignore[arg-type]


_run = torch._C._disabled_torch_function_impl
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward}


def _has_graph(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.grad_fn is not None
    return isinstance(result, list | tuple) and any(map(_has_graph, result))


def _name(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """Of the first sharded parameter among the arguments: its name and its unit's."""
    for value in (*args, *(kwargs or {}).values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, ShardedParameter):
                return str(item.__dict__.get("_pdt_name", "a parameter"))
    return "a parameter"
