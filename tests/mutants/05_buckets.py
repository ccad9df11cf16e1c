"""Wrong solutions of lesson 05: mixed buckets, hasty counters, wires that are never busy."""

from pdt.comm import cost
from tests.mutants import mutant

ONCE = "puts each parameter into one bucket, once"
DTYPE = "keeps one dtype in a bucket"
CAPS = "closes a bucket when it has reached its cap"
BACKWARD = "follows the order of backward"
PLAN = "lets buckets leave in the order of the plan"
LAST = "lets a bucket leave with its last gradient"
OFTEN = "counts a gradient that comes several times"
LATE = "refuses a gradient that comes too late"
AFRESH = "says what is missing, and starts afresh"
BEST = "finds the best cap"
MODEL = "predicts the step's time by the model"
ON_WIRE = "predicts what the emulated wire takes, within 25 %"


def first_positions(params):
    """Each tensor once, at its first position."""
    seen = {}
    for i, param in enumerate(params):
        seen.setdefault(id(param), i)
    return list(seen.values())


def fill(params, order, cap_nbytes, first_nbytes, key=lambda param: param.dtype):
    """The right rule over positions in this order."""
    buckets, filling, filled, caps = [], {}, {}, {}
    for i in order:
        kind = key(params[i])
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(i)
        filled[kind] += params[i].nbytes
        if filled[kind] >= caps.get(kind, first_nbytes):
            caps[kind] = cap_nbytes
            del filling[kind]
    return buckets


@mutant("assign", fails=ONCE)
def takes_tied_ones_twice(params, cap_nbytes, first_nbytes):
    """Takes positions for parameters."""
    return fill(params, reversed(range(len(params))), cap_nbytes, first_nbytes)


@mutant("assign", fails=DTYPE)
def mixes_dtypes(params, cap_nbytes, first_nbytes):
    """One open bucket for all dtypes."""
    order = reversed(first_positions(params))
    return fill(params, order, cap_nbytes, first_nbytes, key=lambda param: None)


@mutant("assign", fails=CAPS)
def never_over_the_cap(params, cap_nbytes, first_nbytes):
    """Closes a bucket before the parameter that would reach over its cap."""
    buckets, filling, filled, caps = [], {}, {}, {}
    for i in reversed(first_positions(params)):
        kind = params[i].dtype
        if kind in filling and filled[kind] + params[i].nbytes > caps.get(kind, first_nbytes):
            caps[kind] = cap_nbytes
            del filling[kind]
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(i)
        filled[kind] += params[i].nbytes
    return buckets


@mutant("assign", fails=CAPS)
def one_cap_for_all(params, cap_nbytes, first_nbytes):
    """The first bucket as large as the others."""
    return fill(params, reversed(first_positions(params)), cap_nbytes, cap_nbytes)


@mutant("assign", fails=BACKWARD)
def from_the_first_layer_on(params, cap_nbytes, first_nbytes):
    """The order of registration: the first bucket is the last to fill."""
    return fill(params, first_positions(params), cap_nbytes, first_nbytes)


@mutant("assign", fails=BACKWARD)
def listed_when_closed(params, cap_nbytes, first_nbytes):
    """Lists buckets as they are closed; one that is opened early and filled late comes last."""
    buckets = fill(params, reversed(first_positions(params)), cap_nbytes, first_nbytes)
    return sorted(buckets, key=lambda bucket: -bucket[-1])


class Counting:
    """The right counter."""

    def __init__(self, buckets, expected):
        self.buckets, self.expected = buckets, expected
        self.of = {i: k for k, bucket in enumerate(buckets) for i in bucket}
        self.reset()

    def reset(self):
        self.next, self.seen = 0, dict.fromkeys(self.expected, 0)
        self.pending = [len(bucket) for bucket in self.buckets]

    def arrive(self, param):
        if self.of[param] < self.next:
            raise RuntimeError(f"parameter {param} has left")
        self.count(param)
        return self.leave()

    def count(self, param):
        self.seen[param] += 1
        if self.seen[param] == self.expected[param]:
            self.pending[self.of[param]] -= 1

    def leave(self):
        start = self.next
        while self.next < len(self.buckets) and self.pending[self.next] == 0:
            self.next += 1
        return list(range(start, self.next))

    def end(self):
        missing = sorted(i for i in self.seen if self.seen[i] < self.expected[i])
        self.reset()
        return missing


@mutant("ReadyCount", fails=PLAN)
class SendsWhatIsFull(Counting):
    """A bucket leaves as soon as it is full: each rank has an order of its own."""

    def reset(self):
        super().reset()
        self.gone = set()

    def arrive(self, param):
        if self.of[param] in self.gone:
            raise RuntimeError(f"parameter {param} has left")
        self.count(param)
        full = [k for k, left in enumerate(self.pending) if left == 0 and k not in self.gone]
        self.gone.update(full)
        return full


@mutant("ReadyCount", fails=LAST)
class OneAtATime(Counting):
    """Lets one bucket go with a gradient, though it may have released several."""

    def leave(self):
        if self.next < len(self.buckets) and self.pending[self.next] == 0:
            self.next += 1
            return [self.next - 1]
        return []


@mutant("ReadyCount", fails=OFTEN)
class CountsArrivals(Counting):
    """One that comes twice is taken for two, and its bucket leaves without the other."""

    def count(self, param):
        self.seen[param] += 1
        self.pending[self.of[param]] -= 1


@mutant("ReadyCount", fails=LATE)
class AcceptsLateOnes(Counting):
    """What comes after its bucket has left is added to nothing, and nobody hears of it."""

    def arrive(self, param):
        self.count(param)
        return self.leave()


@mutant("ReadyCount", fails=AFRESH)
class NeverResets(Counting):
    """The counts of one backward go on in the next."""

    def end(self):
        return sorted(i for i in self.seen if self.seen[i] < self.expected[i])


@mutant("ReadyCount", fails=(OFTEN, AFRESH))
class NamesBuckets(Counting):
    """Says which buckets did not leave, not which parameters made them stay."""

    def end(self):
        missing = list(range(self.next, len(self.buckets)))
        self.reset()
        return missing


def split(param_nbytes, cap):
    """The right buckets."""
    plan, filled = [[]], 0
    for i, nbytes in enumerate(param_nbytes):
        if filled >= cap and plan[-1]:
            plan.append([])
            filled = 0
        plan[-1].append(i)
        filled += nbytes
    return plan


def step_s(param_nbytes, ready_s, n, link, cap):
    """The right model of the step."""
    free_s = 0.0
    for bucket in split(param_nbytes, cap):
        nbytes = sum(param_nbytes[i] for i in bucket)
        free_s = max(free_s, ready_s[bucket[-1]]) + cost.ring_all_reduce_s(nbytes, n, link)
    return free_s


def fastest(caps, model):
    """The cap for which the model's time is least, and that time."""
    best = min(caps, key=model)
    return best, model(best)


@mutant("best_cap", fails=BEST)
def everything_at_the_end(param_nbytes, ready_s, n, link, caps):
    """One bucket: nothing is sent before backward has ended."""
    cap = max(caps)
    return cap, step_s(param_nbytes, ready_s, n, link, cap)


@mutant("best_cap", fails=(BEST, MODEL, ON_WIRE))
def messages_are_free(param_nbytes, ready_s, n, link, caps):
    """Without latency, more buckets are always better."""
    free = cost.Link(0.0, link.bandwidth)
    return fastest(caps, lambda cap: step_s(param_nbytes, ready_s, n, free, cap))


@mutant("best_cap", fails=(BEST, MODEL, ON_WIRE))
def no_overlap(param_nbytes, ready_s, n, link, caps):
    """Backward, then as many transfers as the smallest cap makes: nothing is hidden."""
    sizes = [sum(param_nbytes[i] for i in bucket) for bucket in split(param_nbytes, min(caps))]
    wire_s = sum(cost.ring_all_reduce_s(size, n, link) for size in sizes)
    return min(caps), ready_s[-1] + wire_s


@mutant("best_cap", fails=(BEST, MODEL, ON_WIRE))
def a_wire_for_each(param_nbytes, ready_s, n, link, caps):
    """As if transfers did not wait for each other."""

    def model(cap):
        return max(
            ready_s[bucket[-1]]
            + cost.ring_all_reduce_s(sum(param_nbytes[i] for i in bucket), n, link)
            for bucket in split(param_nbytes, cap)
        )

    return fastest(caps, model)


@mutant("best_cap", fails=(BEST, MODEL, ON_WIRE))
def hides_everything(param_nbytes, ready_s, n, link, caps):
    """The longer of compute and communication, as if the first bucket were ready at once."""

    def model(cap):
        sizes = [sum(param_nbytes[i] for i in bucket) for bucket in split(param_nbytes, cap)]
        return max(ready_s[-1], sum(cost.ring_all_reduce_s(size, n, link) for size in sizes))

    return fastest(caps, model)
