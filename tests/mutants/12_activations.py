"""Wrong solutions of lesson 12: random numbers forgotten, tensors held, views mistaken."""

import itertools
import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.mutants import mutant

RESULTS = "returns what fn returns"
GRADIENTS = "gives the gradients of the first run, to the bit"
RUNS = "runs fn once in forward and once in backward"
STREAM = "leaves the random stream alone"
KEEPS = "keeps the arguments alone"
FREES = "frees what it brought back as backward uses it"
SAME = "gives the same gradients, to the bit"
STAY = "lets parameters and their views stay"
ONCE = "carries each storage once each way"
DEVICE = "frees the device, and in the end the host"
EXACT = "is exact"
NEAR = "is within 5 % of a run"


class Call:
    """The right one, from which the wrong ones differ in one thing."""

    def __init__(self, fn, args):
        self.fn, self.args = fn, args
        self.numbers, self.back = itertools.count(), {}
        self.state = torch.get_rng_state()

    def pack(self, tensor):
        return next(self.numbers)

    def unpack(self, number):
        if number not in self.back:
            self.recompute()
        return self.back.pop(number)

    def recompute(self):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            self.run()

    def run(self):
        numbers = itertools.count()

        def note(tensor):
            tensor = self.back[next(numbers)] = tensor.detach()
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            self.fn(*self.args)

    def __call__(self):
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.fn(*self.args)


@mutant("checkpoint", fails=(RUNS, KEEPS, FREES))
def does_nothing(fn, *args):
    """Only calls the function."""
    return fn(*args)


@mutant("checkpoint", fails=(GRADIENTS, STREAM))
def forgets_the_random_state(fn, *args):
    """Draws new random numbers the second time."""

    class Forgets(Call):
        def recompute(self):
            self.run()

    return Forgets(fn, args)()


@mutant("checkpoint", fails=STREAM)
def sets_the_random_state_for_good(fn, *args):
    """Sets the state back for the second run, and leaves it so."""

    class Sets(Call):
        def recompute(self):
            torch.set_rng_state(self.state)
            self.run()
            torch.rand(1)

    return Sets(fn, args)()


@mutant("checkpoint", fails=RUNS)
def runs_for_every_tensor(fn, *args):
    """Runs the function again for each tensor that backward asks for."""

    class Every(Call):
        def unpack(self, number):
            self.recompute()
            tensor = self.back[number]
            self.back.clear()
            return tensor

    return Every(fn, args)()


@mutant("checkpoint", fails=(RUNS, FREES))
def keeps_what_it_brought_back(fn, *args):
    """Hands the tensors out and holds them, for the next time; and once for all calls."""

    class Keeps(Call):
        def unpack(self, number):
            if number not in self.back:
                self.recompute()
            held.append(self.back)
            return self.back[number]

    held = kept_for_all
    return Keeps(fn, args)()


kept_for_all = []


@mutant("checkpoint", fails=(RESULTS, GRADIENTS, RUNS, STREAM))
def tries_it_first(fn, *args):
    """Runs the function without gradients first, and returns what a second run gives."""
    with torch.no_grad():
        fn(*args)
    return Call(fn, args)()


def is_parameter(tensor):
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


class Copy:
    """A storage's bytes on the host."""

    def __init__(self, storage, bus):
        self.of, self.bus, self.back = weakref.ref(storage), bus, None
        device = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.host = torch.empty_like(device)
        bus.to_host([(device, self.host)]).wait()

    def fetch(self):
        back = torch.empty_like(self.host)
        self.bus.to_device([(self.host, back)]).wait()
        return back.untyped_storage()

    def storage(self):
        if self.back is None:
            self.back = self.fetch()
        return self.back


class Hooks:
    """The right ones, from which the wrong ones differ in one thing."""

    def __init__(self, bus):
        self.bus, self.copies = bus, weakref.WeakValueDictionary()

    def stays(self, tensor):
        return is_parameter(tensor)

    def copy_of(self, tensor):
        storage = tensor.untyped_storage()
        copy = self.copies.get(id(storage))
        if copy is None or copy.of() is not storage:
            copy = self.copies[id(storage)] = Copy(storage, self.bus)
        return copy

    def pack(self, tensor):
        if self.stays(tensor):
            return tensor
        geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        return self.copy_of(tensor), tensor.dtype, *geometry

    def unpack(self, packed):
        if isinstance(packed, Tensor):
            return packed
        copy, dtype, *geometry = packed
        return torch.empty(0, dtype=dtype).set_(copy.storage(), *geometry)

    def both(self):
        return self.pack, self.unpack


@mutant("offload_hooks", fails=STAY)
def sends_everything(bus):
    """Parameters leave, too."""

    class Everything(Hooks):
        def stays(self, tensor):
            return False

    return Everything(bus).both()


@mutant("offload_hooks", fails=STAY)
def sends_views_of_parameters(bus):
    """Knows a parameter, and not the transposed weight that a linear layer saves."""

    class Views(Hooks):
        def stays(self, tensor):
            return isinstance(tensor, nn.Parameter)

    return Views(bus).both()


@mutant("offload_hooks", fails=(SAME, ONCE))
def by_address(bus):
    """Keeps one tensor for an address, whatever its shape, strides and dtype."""
    copies = {}

    def pack(tensor):
        if is_parameter(tensor):
            return tensor
        host = copies.get((tensor.data_ptr(), tensor.shape))
        if host is None:
            host = copies[tensor.data_ptr(), tensor.shape] = torch.empty_like(tensor)
            bus.to_host([(tensor, host)]).wait()
        return host, tensor.dtype

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        back = torch.empty_like(packed[0])
        bus.to_device([(packed[0], back)]).wait()
        return back

    return pack, unpack


@mutant("offload_hooks", fails=(SAME,))
def forgets_strides(bus):
    """Lays the shape over the storage as if every tensor were contiguous."""

    class Contiguous(Hooks):
        def unpack(self, packed):
            if isinstance(packed, Tensor):
                return packed
            copy, dtype, offset, shape, _ = packed
            strides = torch.empty(shape, device="meta").stride()
            return torch.empty(0, dtype=dtype).set_(copy.storage(), offset, shape, strides)

    return Contiguous(bus).both()


@mutant("offload_hooks", fails=ONCE)
def copies_every_view(bus):
    """Right in every value; a storage goes as often as tensors of it are saved."""

    class Every(Hooks):
        def copy_of(self, tensor):
            return Copy(tensor.untyped_storage(), self.bus)

    return Every(bus).both()


@mutant("offload_hooks", fails=DEVICE)
def keeps_the_tensor(bus):
    """Sends a copy to the host, and has the graph hold the tensor as well."""

    class Keeps(Hooks):
        def pack(self, tensor):
            if self.stays(tensor):
                return tensor
            return self.copy_of(tensor), tensor.dtype, tensor.detach()

        def unpack(self, packed):
            if isinstance(packed, Tensor):
                return packed
            copy, dtype, tensor = packed
            geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=dtype).set_(copy.storage(), *geometry)

    return Keeps(bus).both()


def segments(inputs, kept, lengths):
    """The bounds of each segment."""
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))


@mutant("segment_peak", fails=(EXACT, NEAR))
def largest_segment(inputs, kept, lengths):
    """The largest segment, and all inputs of segments, also of those that are gone."""
    bounds = segments(inputs, kept, lengths)
    waiting = sum(inputs[start] for start, _ in bounds)
    return waiting + max(sum(kept[a:b]) + sum(inputs[a + 1 : b]) for a, b in bounds)


@mutant("segment_peak", fails=(EXACT, NEAR))
def after_forward(inputs, kept, lengths):
    """What is kept at the end of forward."""
    return sum(inputs[start] for start, _ in segments(inputs, kept, lengths))


@mutant("segment_peak", fails=(EXACT, NEAR))
def no_inputs_inside(inputs, kept, lengths):
    """Forgets that inside a segment every layer's input is kept."""
    most = waiting = 0
    for start, end in segments(inputs, kept, lengths):
        waiting += inputs[start]
        most = max(most, waiting + sum(kept[start:end]))
    return most


@mutant("segment_peak", fails=(EXACT, NEAR))
def counts_the_first_input_twice(inputs, kept, lengths):
    """The input that waits, and once more with the segment's own."""
    most = waiting = 0
    for start, end in segments(inputs, kept, lengths):
        waiting += inputs[start]
        most = max(most, waiting + sum(kept[start:end]) + sum(inputs[start:end]))
    return most


@mutant("segment_peak", fails=(EXACT, NEAR))
def equal_layers(inputs, kept, lengths):
    """The formula of the lesson, with means: right for equal layers and segments alone."""
    count, length = len(lengths), len(inputs) / len(lengths)
    mean_input, mean = sum(inputs) / len(inputs), sum(inputs + kept) / len(inputs)
    return round(count * mean_input + length * mean - mean_input)
