"""Makes sure that the learner's own code does the work: traps in what it might borrow.

A trap replaces the code *inside* a function, so it bites under whatever name the function was
imported before. Calls of torch's C++ side are not trapped: the meter sees those.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import CodeType, FunctionType, TracebackType
from typing import Any

EMPTY_OPS = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
LENDERS = ("pdt", "torch")


class Poisoned(Exception):
    """Something was called that must not do the learner's work; `args[0]` is its name."""


def resolve(name: str) -> FunctionType:
    """The Python function behind a dotted name; a class stands for its `__init__`."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        found = vars(found)["__init__"] if isinstance(found, type) else found
        if not isinstance(found, FunctionType):
            raise TypeError(f"{name} is no Python function and cannot be poisoned: use the meter")
        return found
    raise ModuleNotFoundError(f"no module for {name}")


def _trap(name: str, function: FunctionType) -> CodeType:
    source = (
        "def trap(*args, **kwargs):\n"
        f"    raise __import__({__name__!r}, fromlist=['Poisoned']).Poisoned({name!r})\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    code: CodeType = namespace["trap"].__code__
    return code.replace(co_freevars=function.__code__.co_freevars)  # or Python refuses the exchange


@contextmanager
def poisoned(names: tuple[str, ...]) -> Iterator[None]:
    """While the block runs, these functions raise `Poisoned`, however they are reached."""
    functions = {name: resolve(name) for name in names}
    originals = [(function, function.__code__) for function in functions.values()]
    try:
        for name, function in functions.items():
            function.__code__ = _trap(name, function)
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def poison_in(error: BaseException | None) -> str | None:
    """The name of the trap that led to this error, however it was wrapped since."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if type(error) is Poisoned:
            return str(error.args[0])
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def lender(learner: Any) -> str | None:
    """Where a function or class handed in was taken from, when it is not the learner's own."""
    while isinstance(learner, functools.partial):
        learner = learner.func
    if not isinstance(learner, type) and not inspect.isroutine(learner):
        return None
    learner = inspect.unwrap(learner)
    module = getattr(learner, "__module__", None) or ""
    if module.split(".")[0] in LENDERS:
        return f"{module}.{getattr(learner, '__qualname__', '')}"
    return None


def is_unwritten(learner: Any) -> bool:
    """Whether this is a stub: None, `...`, or a function with nothing but a docstring in it."""
    if learner is None or learner is Ellipsis:
        return True
    if not isinstance(learner, FunctionType):
        return False
    steps = list(dis.get_instructions(learner))
    return all(
        step.opname in EMPTY_OPS and ("CONST" not in step.opname or step.argval in (None, Ellipsis))
        for step in steps
    )


def is_stub_error(error: BaseException) -> bool:
    """Whether a `raise NotImplementedError` of the learner's own led here, not one of torch's."""
    if type(error) is not NotImplementedError or error.__traceback__ is None:
        return False
    last: TracebackType = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, module = last.tb_frame.f_code, last.tb_frame.f_globals.get("__name__", "")
    raised_here = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised_here and module.split(".")[0] not in LENDERS
