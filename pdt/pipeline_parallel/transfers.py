"""Activations and gradients on their way between stages, in an order that cannot deadlock.

A rank sends without waiting, and takes what a peer sends in the order in which that peer's actions
send it, which the schedule tells. What comes before the message that is wanted is kept. So nobody
waits for a message that its sender could only send later, no tags are needed, and any schedule that
`pdt.pipeline_parallel.order.check` accepts runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm.messages import Group, place
from pdt.pipeline_parallel.layout import HEADER_NBYTES, Layout, pack, unpack
from pdt.pipeline_parallel.schedule import FORWARD, WEIGHT_GRAD, Schedule

AHEAD = 2  # receives from a peer that are posted before somebody wants them
ACTIVATION, GRADIENT = "activation", "gradient"


class Key(NamedTuple):
    """A message: the activation that enters `stage`, or the gradient of what left it."""

    kind: str
    microbatch: int
    stage: int


Tensors = list[Tensor | None]
Posted = tuple[Key, list[dist.Work], Tensors]


class Transfers:
    """The messages of one step on one rank.

    `alike[i]` is the same for micro-batches that look the same. `layouts` holds, by stage and that
    number, the layout of what enters the stage; it lives from step to step, and the header goes
    ahead of a message whose layout is not in it yet. Both ends add to theirs at the same message.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        device: torch.device,
        alike: list[int],
        layouts: dict[tuple[int, int], Layout],
    ) -> None:
        self.schedule, self.group, self.device = schedule, group, device
        self.alike, self.layouts = alike, layouts
        self.rank, num_ranks = place(group)
        self._arrived: dict[Key, Tensors] = {}
        self._sent: list[tuple[list[dist.Work], Tensors]] = []
        peers = [peer for peer in range(num_ranks) if peer != self.rank]
        self._coming = {peer: deque(messages_of(schedule, peer, to=self.rank)) for peer in peers}
        self._posted: dict[int, deque[Posted]] = {peer: deque() for peer in peers}

    def layout(self, microbatch: int, stage: int) -> Layout:
        """Of what enters the stage."""
        return self.layouts[stage, self.alike[microbatch]]

    def send_activation(self, microbatch: int, stage: int, tensors: Tensors, look: Layout) -> None:
        """Towards `stage`. ValueError when it looks otherwise than that of an equal input did."""
        key, known = (
            (stage, self.alike[microbatch]),
            self.layouts.get((stage, self.alike[microbatch])),
        )
        if known is not None and known != look:
            raise ValueError(
                f"stage {stage - 1} returned {look} for micro-batch {microbatch}, and {known} for "
                "an input of the same shapes before: a stage's shapes, dtypes and requires_grad "
                "must follow from those of the pipeline's inputs; make a new Pipeline after "
                "freezing or unfreezing"
            )
        header = [] if known is not None else [pack(look).to(self.device)]
        self.layouts[key] = look
        peer = self.schedule.place(stage)[0]
        self._send(
            peer, Key(ACTIVATION, microbatch, stage), tensors, header if peer != self.rank else []
        )

    def send_gradient(self, microbatch: int, stage: int, tensors: Tensors) -> None:
        """Towards `stage`, which sent the activation; nothing if no tensor of it wants one."""
        if any(tensor is not None for tensor in tensors):
            peer = self.schedule.place(stage)[0]
            self._send(peer, Key(GRADIENT, microbatch, stage), tensors, [])

    def receive(self, kind: str, microbatch: int, stage: int) -> Tensors:
        """What the neighbour of `stage` has sent, waiting for it; fresh tensors, or the sender's
        where that is this rank. Empty if there is no gradient."""
        key = Key(kind, microbatch, stage)
        if kind == GRADIENT and not self.layout(microbatch, stage + 1).has_grad:
            return []
        peer = self.schedule.place(stage + (1 if kind == GRADIENT else -1))[0]
        while key not in self._arrived:
            self._post(peer, 1)
            self._take(peer)
            self._post(peer, AHEAD)
        return self._arrived.pop(key)

    def post_ahead(self) -> None:
        """Start the receives that are known, and let go of what has been sent."""
        for peer in self._coming:
            self._post(peer, AHEAD)
        self._sent = [s for s in self._sent if not all(work.is_completed() for work in s[0])]

    def finish(self) -> None:
        """Wait until all is sent."""
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent = []

    def _send(self, peer: int, key: Key, tensors: Tensors, header: list[Tensor]) -> None:
        tensors = [tensor if tensor is None else tensor.detach() for tensor in tensors]
        if peer == self.rank:
            self._arrived[key] = tensors
            return
        whole = [*header, *(t.contiguous() for t in tensors if t is not None and t.numel())]
        works = [_start(dist.isend, _plain(t), self.group, peer) for t in whole]
        self._sent.append((works, list(whole)))  # held until they have gone

    def _post(self, peer: int, up_to: int) -> None:
        """Post receives from the peer until `up_to` wait, or one's layout is not known.

        The first of them is then learned from its header, but only for who waits (`up_to` 1).
        """
        coming, posted = self._coming[peer], self._posted[peer]
        while coming and len(posted) < up_to:
            layout = self._known(coming[0], peer, may_wait=up_to == 1)
            if layout is None:
                return
            key = coming.popleft()
            wanted = key.kind == ACTIVATION
            if not wanted and not layout.has_grad:
                continue
            boxes: Tensors = [
                torch.empty(part.shape, dtype=part.dtype, device=self.device)
                if part is not None and (wanted or part.requires_grad)
                else None
                for part in layout.parts
            ]
            full = [box for box in boxes if box is not None and box.numel()]
            works = [_start(dist.irecv, _plain(box), self.group, peer) for box in full]
            posted.append((key, works, boxes))

    def _known(self, key: Key, peer: int, may_wait: bool) -> Layout | None:
        entered = key.stage + (1 if key.kind == GRADIENT else 0)
        at = (entered, self.alike[key.microbatch])
        if at not in self.layouts and may_wait and key.kind == ACTIVATION:
            header = torch.empty(HEADER_NBYTES, dtype=torch.uint8, device=self.device)
            _start(dist.irecv, header, self.group, peer).wait()
            self.layouts[at] = unpack(header)
        return self.layouts.get(at)

    def _take(self, peer: int) -> None:
        if not self._posted[peer]:
            raise RuntimeError(
                f"rank {self.rank} waits for a message that rank {peer} does not send: check the "
                "schedule by pdt.pipeline_parallel.order.check"
            )
        key, works, boxes = self._posted[peer].popleft()
        for work in works:
            work.wait()
        self._arrived[key] = boxes


def messages_of(schedule: Schedule, rank: int, to: int) -> Iterator[Key]:
    """The messages of `rank` to another rank, in the order in which it sends them."""
    for action in schedule.actions[rank]:
        if action.kind == WEIGHT_GRAD:
            continue
        forth = action.kind == FORWARD
        stage = schedule.stage(rank, action.chunk) + (1 if forth else -1)
        if 0 <= stage < schedule.num_stages and schedule.place(stage)[0] == to:
            yield Key(ACTIVATION if forth else GRADIENT, action.microbatch, stage)


def _plain(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that every backend sends."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _start(call: object, tensor: Tensor, group: Group, peer: int) -> dist.Work:
    work = call(tensor, group=group, **{"group_dst" if call is dist.isend else "group_src": peer})  # type: ignore[operator]
    assert work is not None  # None is for outsiders
    return work
