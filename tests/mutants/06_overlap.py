"""Wrong solutions of lesson 06: sent too late, in another order, too often, counted twice."""

import torch
import torch.distributed as dist
from torch.autograd import Variable

from tests.mutants import mutant

MEAN = "leaves the mean of all ranks in every gradient, in every step"
CALLS = "makes one all_reduce for each group"
ORDER = "sends the groups in their order, whatever is ready first"
EARLY = "sends a group while backward goes on"
GOES_ON = "does not wait before backward has ended"
GRADIENT = "leaves the gradient of the mean over all micro-batches of all ranks"
ONCE = "reduces once in a window"
ALONE = "runs each micro-batch by itself"
UNCOVERED = "finds what no compute covers"
MOMENTS = "counts a moment once, however many spans cover it"


class Sender:
    """The right hooks, in parts that a mutant replaces."""

    def __init__(self, groups):
        self.groups = groups
        self.reset()
        for number, group in enumerate(groups):
            for param in group:
                param.register_post_accumulate_grad_hook(lambda p, i=number: self.arrive(i))

    def reset(self):
        self.missing, self.works, self.next = [len(g) for g in self.groups], [], 0
        self.running = False

    def arrive(self, number):
        if not self.running:
            self.running = True
            Variable._execution_engine.queue_callback(self.end)
        self.missing[number] -= 1
        self.send_full(number)

    def send_full(self, number):
        while self.next < len(self.groups) and self.missing[self.next] == 0:
            self.send(self.groups[self.next])
            self.next += 1

    def send(self, group):
        flat = torch.cat([p.grad.view(-1) for p in group]) / dist.get_world_size()
        self.works.append((group, flat, dist.all_reduce(flat, async_op=True)))

    def end(self):
        self.hand_out()
        self.reset()

    def hand_out(self):
        for group, flat, work in self.works:
            work.wait()
            for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad.copy_(part.view_as(p))


@mutant("overlap_hooks", fails=EARLY)
def after_backward(groups):
    """All-reduce after backward: the right means, and nothing overlaps."""

    class Late(Sender):
        def send_full(self, number):
            pass

        def end(self):
            for group in self.groups:
                self.send(group)
            super().end()

    Late(groups)


@mutant("overlap_hooks", fails=GOES_ON)
def waits_in_the_hook(groups):
    """Sends at the right moment, and holds backward up until the sum is there."""

    class Waiting(Sender):
        def send(self, group):
            super().send(group)
            self.works[-1][2].wait()

    Waiting(groups)


@mutant("overlap_hooks", fails=(MEAN, ORDER))
def in_ready_order(groups):
    """Sends what is full first: ranks whose gradients come in other orders add different groups."""

    class Eager(Sender):
        def send_full(self, number):
            if self.missing[number] == 0:
                self.send(self.groups[number])

    Eager(groups)


@mutant("overlap_hooks", fails=(MEAN, CALLS, EARLY))
def for_one_step(groups):
    """The counts are never set back, so the second backward sends nothing."""

    class Once(Sender):
        def end(self):
            self.hand_out()
            self.works, self.running = [], False

    Once(groups)


@mutant("overlap_hooks", fails=CALLS)
def one_call_each(groups):
    """A call for each parameter of a group, where one would do."""

    class Single(Sender):
        def send(self, group):
            for param in group:
                super().send([param])

    Single(groups)


@mutant("overlap_hooks", fails=MEAN)
def sums(groups):
    """The sum of all ranks, not their mean."""

    class Sum(Sender):
        def hand_out(self):
            super().hand_out()
            for group, _, _ in self.works:
                for p in group:
                    p.grad.mul_(dist.get_world_size())

    Sum(groups)


@mutant("accumulate", fails=ONCE)
def sync_each(ddp, loss_of, micro_batches):
    """Every micro-batch pays for a reduction. (The means of sums are right.)"""
    for batch in micro_batches:
        (loss_of(ddp, batch) / len(micro_batches)).backward()


@mutant("accumulate", fails=ONCE)
def only_backward_inside(ddp, loss_of, micro_batches):
    """What counts is where the forward stands: these are all synchronised."""
    *others, last = micro_batches
    for batch in others:
        loss = loss_of(ddp, batch) / len(micro_batches)
        with ddp.no_sync():
            loss.backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()


@mutant("accumulate", fails=(GRADIENT, ONCE))
def never_syncs(ddp, loss_of, micro_batches):
    """The last micro-batch is inside, too: each rank keeps its own gradients."""
    with ddp.no_sync():
        for batch in micro_batches:
            (loss_of(ddp, batch) / len(micro_batches)).backward()


@mutant("accumulate", fails=GRADIENT)
def syncs_the_first(ddp, loss_of, micro_batches):
    """Reduces the first micro-batch and adds this rank's own others to the mean."""
    first, *others = micro_batches
    (loss_of(ddp, first) / len(micro_batches)).backward()
    with ddp.no_sync():
        for batch in others:
            (loss_of(ddp, batch) / len(micro_batches)).backward()


@mutant("accumulate", fails=GRADIENT)
def not_divided(ddp, loss_of, micro_batches):
    """The gradient of the sum over micro-batches, as if the learning rate were larger."""
    *others, last = micro_batches
    with ddp.no_sync():
        for batch in others:
            loss_of(ddp, batch).backward()
    loss_of(ddp, last).backward()


@mutant("accumulate", fails=ALONE)
def one_large_batch(ddp, loss_of, micro_batches):
    """All micro-batches in one forward: the memory that accumulation is to save."""
    loss_of(ddp, torch.cat(micro_batches)).backward()


def joined(spans):
    """The same moments as disjoint spans."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(a, b):
    """Seconds that two spans share."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


@mutant("exposed", fails=(UNCOVERED, MOMENTS))
def difference_of_sums(compute, communication):
    """As if all compute ran beside communication."""
    total = sum(end - start for start, end in joined(communication))
    return max(0, total - sum(end - start for start, end in joined(compute)))


@mutant("exposed", fails=(UNCOVERED, MOMENTS))
def only_the_tail(compute, communication):
    """What comes after the last compute; gaps between are forgotten."""
    end = max((end for _, end in compute), default=0)
    return max(0, max((end for _, end in communication), default=end) - end)


@mutant("exposed", fails=MOMENTS)
def twice_when_two_transfers(compute, communication):
    """A send and a receive at one moment are one moment, not two."""
    return sum(
        end - start - sum(common((start, end), busy) for busy in joined(compute))
        for start, end in communication
    )


@mutant("exposed", fails=MOMENTS)
def subtracts_compute_twice(compute, communication):
    """Two spans of compute that overlap hide a moment once, not twice."""
    return sum(
        max(0, end - start - sum(common((start, end), busy) for busy in compute))
        for start, end in joined(communication)
    )
