"""Wrong solutions of lesson 13: cut the wrong edges, carry too late or too much, lose an update."""

from collections import deque
from itertools import product

import torch

from tests.mutants import mutant

FITS = "keeps what is pinned, within the budget"
CROSSES = "lets the least cross the bus"
KEEPS = "keeps the least memory of equally cheap cuts"
PAPERS = "finds ZeRO-Offload's placement"
RIGHT = "steps each parameter by its gradient"
ADDS = "adds up several backwards in fp32"
ALONE = "leaves a parameter without a gradient alone"
BYTES = "carries 2 bytes a parameter each way"
EARLY = "lets gradients leave during backward"
FEW = "holds three gradients at most on the device"
RETURNS = "returns a parameter while the host steps the next"
WARM = "updates at once during the warm-up"
LATE = "applies each later update one step late"
MEANWHILE = "lets the host work while the device computes"
HANDS = "hands the gradients over to the host"
FLUSHES = "flushes what is pending, once"


def choices(nodes, pinned, budget):
    """Every placement that fits, the emptiest last."""
    for flags in product((True, False), repeat=len(nodes)):
        on = {name for name, flag in zip(nodes, flags, strict=True) if flag}
        if on >= pinned and sum(nodes[name] for name in on) <= budget:
            yield on


def crossing(on, edges):
    return sum(nbytes for (a, b), nbytes in edges.items() if (a in on) != (b in on))


@mutant("best_placement", fails=(CROSSES, PAPERS))
def one_direction(nodes, edges, pinned, budget):
    """Counts what leaves the device, and not what comes back."""

    def cost(on):
        leaving = sum(nbytes for (a, b), nbytes in edges.items() if a in on and b not in on)
        return leaving, sum(nodes[name] for name in on)

    return min(choices(nodes, pinned, budget), key=cost)


@mutant("best_placement", fails=(FITS, PAPERS))
def no_budget(nodes, edges, pinned, budget):
    """All on the device: nothing crosses, and it does not fit."""
    return set(nodes)


@mutant("best_placement", fails=(FITS, PAPERS))
def nothing_pinned(nodes, edges, pinned, budget):
    """Moves the computation to the host, too: no traffic, and no training in a lifetime."""
    return min(
        choices(nodes, set(), budget),
        key=lambda on: (crossing(on, edges), sum(nodes[name] for name in on)),
    )


@mutant("best_placement", fails=(KEEPS, PAPERS))
def the_first_of_the_cheapest(nodes, edges, pinned, budget):
    """Looks at traffic alone, and takes the first that has the least."""
    return min(choices(nodes, pinned, budget), key=lambda on: crossing(on, edges))


@mutant("best_placement", fails=(CROSSES, PAPERS))
def smallest_first(nodes, edges, pinned, budget):
    """Memory before traffic: frees p16 too, and carries it twice in every step."""
    return min(
        choices(nodes, pinned, budget),
        key=lambda on: (sum(nodes[name] for name in on), crossing(on, edges)),
    )


@mutant("best_placement", fails=(CROSSES, KEEPS, PAPERS))
def largest_out(nodes, edges, pinned, budget):
    """Greedy: moves the largest node to the host until the rest fits, whatever its edges carry."""
    on = set(nodes)
    while sum(nodes[name] for name in on) > budget:
        on.remove(max(sorted(on - pinned), key=nodes.get))
    return on


class Step:
    """The right way of a step, in parts that a mutant replaces."""

    limit = 2

    def __init__(self, params, host, bus):
        self.params, self.host, self.bus = params, host, bus
        self.sums, self.under_way = {}, deque()
        self.listen()

    def listen(self):
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self.leave(i))

    def leave(self, i):
        if len(self.under_way) == self.limit:
            self.arrive()
        grad, self.params[i].grad = self.params[i].grad, None
        place = torch.empty_like(grad)
        self.under_way.append((i, self.bus.to_host([(grad, place)]), place))

    def arrive(self):
        i, transfer, place = self.under_way.popleft()
        transfer.wait()
        self.take(i, place.float())

    def take(self, i, grad):
        self.sums[i] = self.sums[i] + grad if i in self.sums else grad

    def step(self):
        while self.under_way:
            self.arrive()
        self.update(list(self.sums))
        self.sums.clear()

    def update(self, used):
        returns = [self.give_back(i, self.host.step(i, self.sums[i])) for i in used]
        for transfer in returns:
            transfer.wait()

    def give_back(self, i, new):
        return self.bus.to_device([(new, self.params[i].detach())])


@mutant("OffloadedStep", fails=(ADDS, EARLY, FEW))
class InTheStep(Step):
    """Carries everything in the step: all gradients wait for it, and add up in 16 bits."""

    def listen(self):
        pass

    def step(self):
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self.leave(i)
        super().step()


@mutant("OffloadedStep", fails=ADDS)
class Copies(Step):
    """What arrives last is the gradient: right as long as nobody accumulates."""

    def take(self, i, grad):
        self.sums[i] = grad


@mutant("OffloadedStep", fails=RETURNS)
class OneAfterTheOther(Step):
    """Waits for each return, so the host idles while the bus carries, and the other way round."""

    def give_back(self, i, new):
        transfer = super().give_back(i, new)
        transfer.wait()
        return transfer


@mutant("OffloadedStep", fails=(ALONE, BYTES))
class StepsAll(Step):
    """A parameter without a gradient gets one of zeros: momentum goes on, and it travels."""

    def update(self, used):
        for i, p in enumerate(self.params):
            self.sums.setdefault(i, torch.zeros(p.shape))
        super().update(range(len(self.params)))


@mutant("OffloadedStep", fails=FEW)
class NeverWaits(Step):
    """No limit: where the bus is slower than backward, all gradients wait on the device."""

    limit = 10**9


@mutant("OffloadedStep", fails=(RIGHT, ADDS, ALONE))
class ReadsTooSoon(Step):
    """Takes what it has asked for before it has come."""

    def arrive(self):
        i, transfer, place = self.under_way.popleft()
        self.take(i, place.float())
        transfer.wait()


class Delayed:
    """The right delayed update, in parts that a mutant replaces."""

    def __init__(self, params, host, warmup):
        self.params, self.host, self.warmup = params, host, warmup
        self.job, self.steps = None, 0

    def step(self):
        grads = self.take_grads()
        self.finish()
        self.job = self.host.start(grads)
        if self.is_warming_up():
            self.finish()
        self.steps += 1

    def take_grads(self):
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        return grads

    def is_warming_up(self):
        return self.steps < self.warmup

    def finish(self):
        if self.job is not None:
            self.show(self.job.wait())
            self.job = None

    @torch.no_grad()
    def show(self, new):
        for p, value in zip(self.params, new, strict=True):
            p.copy_(value)

    def flush(self):
        self.finish()


@mutant("DelayedUpdate", fails=(LATE, MEANWHILE, HANDS))
class NeverLate(Delayed):
    """The device waits for the host in every step."""

    def is_warming_up(self):
        return True


@mutant("DelayedUpdate", fails=MEANWHILE)
class WaitsAtOnce(Delayed):
    """Late values without the gain: the host computes in the step, and the device waits."""

    def step(self):
        super().step()
        if self.job is not None:
            self.job.wait()


@mutant("DelayedUpdate", fails=(WARM, LATE, MEANWHILE))
class WarmUpTooShort(Delayed):
    """The last step of the warm-up is late already."""

    def is_warming_up(self):
        return self.steps < self.warmup - 1


@mutant("DelayedUpdate", fails=HANDS)
class KeepsTheGradients(Delayed):
    """The parameters keep the tensors that the host is still reading; the loop clears them."""

    def take_grads(self):
        return [p.grad for p in self.params]


@mutant("DelayedUpdate", fails=(LATE, HANDS, FLUSHES))
class TwoLate(Delayed):
    """Shows in each step what it took in the step before: two steps late."""

    taken = None

    def finish(self):
        if self.job is None:
            return
        new, self.job = self.job.wait(), None
        if self.is_warming_up():
            self.show(new)
        else:
            if self.taken is not None:
                self.show(self.taken)
            self.taken = [value.clone() for value in new]


@mutant("DelayedUpdate", fails=(LATE, HANDS, MEANWHILE, FLUSHES))
class ForgetsTheLast(Delayed):
    """A flush in which nothing happens: a checkpoint lacks an update that was computed."""

    def flush(self):
        pass
