"""One step of a pipeline on one rank: what each action does, and what is kept between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pdt.measure.timeline import Timeline
from pdt.pipeline_parallel.backward import input_grads, whole_backward
from pdt.pipeline_parallel.layout import Layout, Values, message_layout, tensors_of
from pdt.pipeline_parallel.schedule import BACKWARD, FORWARD, INPUT_GRAD, Action
from pdt.pipeline_parallel.simulate import KINDS
from pdt.pipeline_parallel.transfers import ACTIVATION, GRADIENT, Tensors, Transfers


class Batch(NamedTuple):
    """`inputs` by micro-batch where the first stage is, `targets` where the last one is."""

    size: int
    inputs: list[tuple[Any, ...]]
    targets: list[Any] | None


class Kept(NamedTuple):
    """Of a forward, for its backward: what came in, and the roots of the graph."""

    entered: Tensors
    outputs: list[Tensor]  # those that require a gradient


class Run:
    """The actions of one step. `loss` is the mean so far where the last stage is, else None."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        loss_fn: Callable[..., Tensor] | None,
        batch: Batch,
        transfers: Transfers,
        timeline: Timeline,
        keep_outputs: bool,
    ) -> None:
        self._chunks, self._loss_fn, self._batch = chunks, loss_fn, batch
        self._transfers, self._schedule = transfers, transfers.schedule
        self._timeline, self._keep_outputs = timeline, keep_outputs
        self._rank = transfers.rank
        self._kept: dict[tuple[int, int], Kept] = {}
        self._weights: dict[tuple[int, int], Callable[[], None]] = {}
        self._outputs: dict[int, Values] = {}
        backwards = [a for a in self._schedule.actions[self._rank] if a.kind == BACKWARD]
        self._syncs = {action.chunk: action.microbatch for action in backwards}  # the last stays
        self.loss: Tensor | None = None
        self.peak_in_flight = 0

    def take(self, action: Action) -> None:
        self._transfers.post_ahead()
        if action.kind == FORWARD:
            self._forward(action)
        elif action.kind in (BACKWARD, INPUT_GRAD):
            self._backward(action)
        else:
            with self._span(action):
                self._weights.pop(action[1:])()
        kept = len(self._kept) + len(self._weights)
        self.peak_in_flight = max(self.peak_in_flight, kept)

    def outputs(self) -> Values | None:
        """Those of the last stage for all samples, if they were kept."""
        if not self._outputs:
            return None
        in_order = [tensors_of(self._outputs[i]) for i in sorted(self._outputs)]
        merged = tuple(
            None if parts[0] is None else torch.cat(parts) for parts in zip(*in_order, strict=True)
        )
        return merged if isinstance(self._outputs[0], tuple) else merged[0]

    def _span(self, action: Action) -> AbstractContextManager[None]:
        return self._timeline.span(str(action), kind=KINDS[action.kind])

    def _forward(self, action: Action) -> None:
        stage = self._schedule.stage(self._rank, action.chunk)
        entered: Tensors = []
        arguments = self._batch.inputs[action.microbatch] if stage == 0 else ()
        if stage:
            entered = self._transfers.receive(ACTIVATION, action.microbatch, stage)
            _ask_for_gradients(entered, self._transfers.layout(action.microbatch, stage))
            arguments = tuple(entered)
            self._transfers.post_ahead()
        with self._span(action), self._quiet(action):
            values = self._chunks[action.chunk](*arguments)
            look = message_layout(values)
            roots = list(tensors_of(values))
            if stage == self._schedule.num_stages - 1:
                roots = self._finish(action.microbatch, values)
        if stage < self._schedule.num_stages - 1:
            self._transfers.send_activation(action.microbatch, stage + 1, roots, look)
        if torch.is_grad_enabled():
            outputs = [root for root in roots if root is not None and root.requires_grad]
            self._kept[action.microbatch, action.chunk] = Kept(entered, outputs)

    def _quiet(self, action: Action) -> AbstractContextManager[None]:
        """A wrapper that averages gradients does so in the last backward of the chunk alone."""
        chunk = self._chunks[action.chunk]
        is_last = self._syncs.get(action.chunk, action.microbatch) == action.microbatch
        return nullcontext() if is_last or not hasattr(chunk, "no_sync") else chunk.no_sync()  # type: ignore[operator]

    def _finish(self, microbatch: int, values: Values) -> Tensors:
        """The last stage's: the micro-batch's share of the mean loss."""
        if self._keep_outputs:
            kept = tuple(t if t is None else t.detach() for t in tensors_of(values))
            self._outputs[microbatch] = kept if isinstance(values, tuple) else kept[0]  # type: ignore[assignment]
        if self._batch.targets is None or self._loss_fn is None:
            return []
        target = self._batch.targets[microbatch]
        first = target[0] if isinstance(target, tuple) else target
        loss = self._loss_fn(values, target) * (len(first) / self._batch.size)
        share = loss.detach()
        self.loss = share.clone() if self.loss is None else self.loss + share
        return [loss]

    def _backward(self, action: Action) -> None:
        _, microbatch, chunk = action
        stage = self._schedule.stage(self._rank, chunk)
        kept = self._kept[microbatch, chunk]
        grads: Tensors = [None]
        if stage < self._schedule.num_stages - 1:
            came = self._transfers.receive(GRADIENT, microbatch, stage)
            grads = [grad for grad in came if grad is not None]
            self._transfers.post_ahead()
        grads = grads[: len(kept.outputs)]
        inputs = [t for t in kept.entered if t is not None and t.requires_grad]
        del self._kept[microbatch, chunk]
        with self._span(action):
            if action.kind == BACKWARD:
                whole_backward(kept.outputs, grads)
                found = [x.grad for x in inputs]
            else:
                found, self._weights[microbatch, chunk] = input_grads(kept.outputs, grads, inputs)
        if stage:
            self._transfers.send_gradient(microbatch, stage - 1, _all(inputs, found))


def _ask_for_gradients(tensors: Tensors, layout: Layout) -> None:
    for tensor, part in zip(tensors, layout.parts, strict=True):
        if tensor is not None and part is not None and part.requires_grad:
            tensor.requires_grad_()


def _all(inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensors:
    """An input that was not used has gradient zero."""
    pairs = zip(inputs, grads, strict=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in pairs]
