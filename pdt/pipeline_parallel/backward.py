"""A backward in one piece, or in two: the gradients of a stage's inputs, later of its weights.

Words: the nodes of autograd's graph through which a gradient comes from the outputs to an input are
*on the path*. A *branch* is such a node from which an edge leads off the path, to a parameter: the
node of `x @ w` is one. The first pass runs along the path and keeps what comes into the branches,
the second goes on from there. The idea, and that of the groups, is Qi et al. 2024, section 2.1
(arXiv:2401.10241), and torch/distributed/pipelining/_backward.py.

A custom autograd.Function is one node: with an input on the path and a weight, its backward runs in
both passes, and only torch's own operations skip the part that is not wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[GradientEdge, Tensor]  # where a gradient enters, and which
Kept = dict[Node, tuple[Tensor | None, ...]]  # what came into a branch


def whole_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves to their `.grad`: the stage's inputs and its weights."""
    if outputs:
        torch.autograd.backward(list(outputs), list(grads))


def input_grads(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """The gradients of `inputs`, and a function that adds those of the weights to their `.grad`.

    The function holds the graph until it has been called or dropped. It hands all gradients to
    autograd at once, so hooks on parameters see them as in one backward. Where there are no inputs,
    it does all the work. Where a parameter has a tensor hook, which would run twice, the first
    pass does all of it.
    """
    filled = [_filled(*pair) for pair in zip(outputs, grads, strict=True)]
    if not inputs or not outputs:
        return [None] * len(inputs), lambda: whole_backward(outputs, filled)
    graph = _Graph(outputs, inputs)
    if any(leaf._backward_hooks for leaf in graph.weights.values()):
        whole_backward(outputs, filled)
        return [x.grad for x in inputs], lambda: None
    found, kept = _along_path(graph, outputs, filled, inputs)
    off_path = [
        (get_gradient_edge(output), grad)
        for output, grad in zip(outputs, filled, strict=True)
        if not graph.is_on_path(output)
    ]
    return found, lambda: _weight_grads(graph, kept, off_path)


def _along_path(
    graph: _Graph, outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Kept]:
    """The gradients of the inputs, and what came into each branch."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if graph.is_on_path(o)]
    if not pairs:
        return [None] * len(inputs), {}
    kept: Kept = {}
    handles = [node.register_prehook(_keeper(kept, node)) for node in graph.branches]
    try:
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            list(inputs),
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(found), kept


def _filled(output: Tensor, grad: Tensor | None) -> Tensor:
    return torch.ones_like(output) if grad is None else grad


def _keeper(kept: Kept, node: Node) -> Callable[..., None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        kept[node] = grads

    return keep


def _weight_grads(graph: _Graph, kept: Kept, off_path: list[Root]) -> None:
    weights: list[Tensor] = []
    grads: list[Tensor] = []
    for ends, branches, nodes in graph.groups():
        roots = [root for root in off_path if root[0].node in nodes]
        came = {branch: kept[branch] for branch in branches if branch in kept}
        found = _from_branches(ends, came, roots)
        there = [(graph.weights[n], g) for n, g in zip(ends, found, strict=True) if g is not None]
        weights += [weight for weight, _ in there]
        grads += [grad for _, grad in there]
    if weights:
        torch.autograd.backward(weights, grads)


def _from_branches(ends: list[Node], came: Kept, roots: list[Root]) -> Sequence[Tensor | None]:
    """The gradients of one group's weights, from what came into its branches and from `roots`."""
    for branch, grads in came.items():
        known = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        roots = [*roots, *((GradientEdge(branch, i), grad) for i, grad in known)]
    if not roots:
        return [None] * len(ends)
    # From one branch a gradient may come to the next by the path: it is in what came there already.
    handles = [branch.register_prehook(_giver(grads)) for branch, grads in came.items()]
    try:
        return torch.autograd.grad(
            [edge for edge, _ in roots],
            [GradientEdge(node, 0) for node in ends],
            [grad for _, grad in roots],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()


def _giver(grads: tuple[Tensor | None, ...]) -> Callable[..., Any]:
    return lambda _: grads


class _Graph:
    """Autograd's graph between outputs and inputs, and what of it leads to weights alone."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._before: dict[Node, list[Node]] = defaultdict(list)  # nearer to the outputs
        ends = [get_gradient_edge(x).node for x in inputs]
        self._roots = {get_gradient_edge(output).node for output in outputs}
        self._walk()
        self._path = self._reached_from(ends)
        self.weights: dict[Node, Tensor] = {
            node: node.variable
            for node in [*self._before, *self._roots]
            if hasattr(node, "variable") and node not in self._path
        }
        off = {n for n in [*self._before, *self._roots] if n not in self._path}
        self.branches = list(
            dict.fromkeys(n for node in off for n in self._before[node] if n in self._path)
        )

    def is_on_path(self, output: Tensor) -> bool:
        return get_gradient_edge(output).node in self._path

    def _walk(self) -> None:
        waiting, seen = list(self._roots), set(self._roots)
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                if following is not None:
                    self._before[following].append(node)
                    if following not in seen:
                        seen.add(following)
                        waiting.append(following)

    def _reached_from(self, starts: Sequence[Node], stop: bool = False) -> set[Node]:
        """The nodes before these, and these; with `stop`, only as far as the path."""
        waiting, seen = list(starts), set(starts)
        while waiting:
            node = waiting.pop()
            if stop and node in self._path:
                continue
            for before in self._before[node]:
                if before not in seen:
                    seen.add(before)
                    waiting.append(before)
        return seen

    def groups(self) -> list[tuple[list[Node], list[Node], set[Node]]]:
        """Weights that share nothing with other groups: (weights, their branches, all nodes)."""
        groups: list[tuple[list[Node], set[Node]]] = []
        for weight in self.weights:
            nodes, weights = self._reached_from([weight], stop=True), [weight]
            for other in [group for group in groups if group[1] & nodes]:
                groups.remove(other)
                weights, nodes = other[0] + weights, other[1] | nodes
            groups.append((weights, nodes))
        return [(w, [n for n in self.branches if n in nodes], nodes) for w, nodes in groups]
