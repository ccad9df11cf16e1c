"""Spans of a model's parts: when each ran forward and when its own part of backward ran."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pdt.measure.clock import Clock, Stamp
from pdt.measure.tensors import tensors_in
from pdt.measure.timeline import Span, Timeline


@contextmanager
def module_spans(
    model: nn.Module,
    *,
    timeline: Timeline | None = None,
    names: Iterable[str] | None = None,
    rank: int = 0,
) -> Iterator[Timeline]:
    """Record a span for each forward and each backward of the named parts of `model`.

    Without `names`, the parts are the direct children, with ModuleList, ModuleDict and Sequential
    opened. A forward span (kind "forward", or "recompute" inside a backward) is the call of the
    module. A backward span goes from the moment when the first of the module's own autograd nodes
    starts to the moment when the last has ended, so the gradient of an input that does not need
    one, a residual around the module and hooks of data parallelism on its parameters do not
    stretch it. On CUDA the stamps are events on the stream, so the spans are the kernels' times.

    Yields `timeline` (a new one of `rank` if None); the spans are there when the block ends, and
    all hooks are gone then, also when it raises. Raises ValueError for a name that `model` lacks.
    """
    timeline = Timeline(rank=rank) if timeline is None else timeline
    parts = _parts(model) if names is None else _named(model, names)
    with ExitStack() as cleanup:
        recorder = _Recorder(Clock.of(model))
        cleanup.callback(recorder.remove_hooks)
        for name, module in parts.items():
            recorder.attach(name, module)
        try:
            yield timeline
        finally:
            timeline.spans.extend(recorder.spans(timeline.rank))


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    parts: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            parts |= {f"{name}.{inner}": module for inner, module in _parts(child).items()}
        else:
            parts[name] = child
    return parts or {type(model).__name__: model}


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    wanted = list(names)
    if missing := [name for name in wanted if name not in modules]:
        raise ValueError(
            f"names={missing} are not modules of {type(model).__name__}; it has {list(modules)}"
        )
    return {name: modules[name] for name in wanted}


class _Recorder:
    """The hooks and the stamps they take: (name, kind) -> pairs of start and end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stamps: list[tuple[str, str, list[Stamp]]] = []
        self.handles: list[Any] = []

    def attach(self, name: str, module: nn.Module) -> None:
        calls: list[tuple[Stamp, int]] = []  # a stack, since a module may call itself

        def before(_module: nn.Module, _args: Any) -> None:
            calls.append((self.clock.stamp(), torch._C._autograd._get_sequence_nr()))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if not calls:  # a pre-hook that ran before ours has raised
                return
            start, first_number = calls.pop()
            kind = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
            self.stamps.append((name, kind, [start, self.clock.stamp()]))
            self._watch_backward(name, _own_nodes(output, first_number))

        self.handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, always_call=True),
        ]

    def _watch_backward(self, name: str, nodes: list[Node]) -> None:
        """Stamp the first start and the last end of these nodes, for each backward through them."""
        passes: dict[int, list[Stamp]] = defaultdict(list)  # by backward pass: start, end

        def starts(_grads: Any) -> None:
            stamps = passes[torch._C._current_graph_task_id()]
            if not stamps:
                stamps.append(self.clock.stamp())
                self.stamps.append((name, "backward", stamps))

        def ends(_grad_inputs: Any, _grad_outputs: Any) -> None:
            passes[torch._C._current_graph_task_id()][1:] = [self.clock.stamp()]

        for node in nodes:
            self.handles += [node.register_prehook(starts), node.register_hook(ends)]

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()

    def spans(self, rank: int) -> Iterator[Span]:
        complete = [entry for entry in self.stamps if len(entry[2]) == 2]
        times_s = iter(self.clock.seconds([stamp for *_, pair in complete for stamp in pair]))
        for name, kind, _ in complete:
            yield Span(name, next(times_s), next(times_s), "compute", kind, rank)


def _own_nodes(output: Any, first_number: int) -> list[Node]:
    """The autograd nodes behind `output` made since the module was called, parameters' aside.

    Nodes are numbered in the order of creation; the accumulators of parameters carry the highest
    number of all, and outlive the call.
    """
    found: dict[Node, None] = {}
    waiting = [tensor.grad_fn for tensor in tensors_in(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or not hasattr(node, "_sequence_nr"):
            continue
        if node._sequence_nr() < first_number or not node.next_functions:
            continue
        found[node] = None
        waiting += [following for following, _ in node.next_functions]
    return list(found)
