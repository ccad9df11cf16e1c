"""Notices what code in a rank has changed: functions of this package and of torch, the meter's way.

It looks at names, at the code behind them and at counts. What hides below Python's surface
(ctypes, the garbage collector's lists, a thread that strikes later) it does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.meter import MeterGroup
from pdt.comm.payload import READERS
from pdt.comm.record import Record

WATCHED = (
    "torch",
    "torch.nn.functional",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
)
CODE = (FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod)
SETTINGS = (torch.get_default_dtype, torch.get_default_device, torch.get_num_threads)


def watch() -> Callable[[], list[str]]:
    """A function that says which of the watched names are not any more what they were just now.

    What it compares with lies in its closure, where code that only looks around does not find it.
    """
    before = tuple(
        (f"{place}.{name}", namespace, name, value, getattr(value, "__code__", None))
        for place, namespace in _namespaces()
        for name, value in list(namespace.items())
        if issubclass(type(value), CODE)  # isinstance would ask the value, and some answer loudly
    )
    settings = tuple((ask, ask()) for ask in SETTINGS)
    of_tensors = frozenset(vars(torch.Tensor))  # a new name here would hide an inherited one

    def changes() -> list[str]:
        changed = [
            full_name
            for full_name, namespace, name, value, code in before
            if namespace.get(name) is not value or getattr(value, "__code__", None) is not code
        ]
        changed += [
            f"torch.Tensor.{name}"
            for name, value in vars(torch.Tensor).items()
            if name not in of_tensors and issubclass(type(value), CODE)
        ]
        return changed + [f"torch.{ask.__name__}()" for ask, value in settings if ask() != value]

    return changes


def _namespaces() -> list[tuple[str, Any]]:
    """Names of modules and classes with their dictionaries, as they are now."""
    found: list[tuple[str, Any]] = [("torch.Tensor", vars(torch.Tensor))]
    for name, module in list(sys.modules.items()):
        if name in WATCHED:
            found.append((name, vars(module)))
        elif name.split(".")[0] == "pdt":
            found.append((name, vars(module)))
            found += [
                (f"{name}.{value.__qualname__}", vars(value))
                for value in list(vars(module).values())
                if isinstance(value, type) and value.__module__ == name
            ]
    return found


class Turnstile:
    """Stands before the group that the meter wraps and counts who passes, metered or not."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.count = inner, 0

    def __getattr__(self, name: str) -> Any:
        self.count += name in READERS
        return getattr(self._inner, name)


class Gate:
    """A context in which no call can pass by the meter unseen: `problem(records)` says what did."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert isinstance(group, MeterGroup)
        self._group = group

    def __enter__(self) -> Gate:
        self._inner = self._group.inner
        self._turnstile = self._group.inner = Turnstile(self._inner)
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.inner = self._inner

    def problem(self, records: list[Record]) -> str | None:
        """What went by the meter, in words; None when nothing did."""
        counted = sum(record.group == self._group.group_name for record in records)
        if counted != self._turnstile.count:
            return f"{self._turnstile.count} calls reached the wire and the meter holds {counted}"
        groups = dist.distributed_c10d._world.pg_map
        if uncounted := [group for group in groups if not isinstance(group, MeterGroup)]:
            return f"{type(uncounted[0]).__name__} was made, a group that does not count"
        return None
