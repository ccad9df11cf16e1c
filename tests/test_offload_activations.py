"""Offloading activations changes no bit, carries each storage once, and gives its memory back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from pdt.comm import Link
from pdt.ddp import DDP
from pdt.measure import Ledger, SavedActivations, saved_activations
from pdt.model import GPT, GPTConfig
from pdt.model.gpt import Block
from pdt.offload import Bus
from pdt.offload.activations import ActivationOffload, offload_activations
from pdt.offload.bus import TO_DEVICE, TO_HOST, Transfer
from pdt.offload.checkpoint import checkpoint
from pdt.offload.cuda_bus import bus_of
from pdt.offload.host_buffers import HostBuffers
from pdt.zero import fully_shard

SHAPE = (4, 16, 24)  # of a batch
SLOW = Link(0.0, 2e7)  # 20 MB/s: a storage of 6 kB takes 0.3 ms


def blocks(count: int = 3, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    config = GPTConfig(block_size=SHAPE[1], num_heads=2, hidden_size=SHAPE[2], **options)
    return nn.Sequential(*(Block(config) for _ in range(count)))


def batch() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).requires_grad_()


def gradients(
    fn: Callable[[Tensor], Tensor], module: nn.Module, context: Any = None
) -> list[Tensor]:
    module.zero_grad()
    x = batch()
    torch.manual_seed(3)
    with context or nullcontext():
        y = fn(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_equal(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    assert all(map(torch.equal, some, others))


def all_of(bus: Bus, **options: Any) -> ActivationOffload:
    """An offload that lets nothing stay for its size."""
    return offload_activations(bus, **{"min_nbytes": 0, **options})


def saved_nbytes(fn: Callable[[], Any], module: nn.Module, at_least: int = 1) -> int:
    """Bytes of the storages that a graph keeps, each once, of those that are large enough."""
    kept = saved_activations(fn, model=module)
    return sum(tensor.nbytes for tensor in kept if tensor.storage_nbytes >= at_least)


@pytest.mark.parametrize("link", [None, SLOW])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3, "unfused": True}])
@pytest.mark.parametrize(("prefetch", "window"), [(0, 1), (2, 4), (99, 99)])
def test_no_bit_changes(link: Any, options: dict[str, Any], prefetch: int, window: int) -> None:
    layers = blocks(2, **options)
    plain = gradients(layers, layers)
    with Bus(link) as bus:
        offload = all_of(bus, prefetch=prefetch, window=window)
        for _ in range(3):
            assert_equal(gradients(layers, layers, offload), plain)


def test_each_storage_is_carried_once_whatever_views_are_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def fn() -> Tensor:
        h = x * 1
        y = h @ h.t()  # square: a view with the wrong geometry would go unnoticed by shapes
        return (y[1:] * y[:-1]).sum() + (h[::2, 3:] * h[1::2, 3:].flip(0)).square().sum()

    (plain,) = torch.autograd.grad(fn(), [x])
    nbytes = saved_nbytes(fn, nn.Identity(), at_least=1000)
    with Bus() as bus:
        with offload_activations(bus, min_nbytes=1000, window=1):
            loss = fn()
        (grad,) = torch.autograd.grad(loss, [x])
        assert torch.equal(grad, plain)
        assert bus.nbytes(TO_HOST) == nbytes
        assert bus.nbytes(TO_DEVICE) < nbytes  # the last to leave is still there


def test_carries_less_than_torchs_save_on_cpu_does() -> None:
    layers = blocks(dropout=0.3, unfused=True)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layers(batch())
    theirs = gradients(layers, layers, save_on_cpu())
    with Bus() as bus:
        assert_equal(gradients(layers, layers, all_of(bus)), theirs)
        mine = bus.nbytes(TO_HOST)
    parameters = sum(p.nbytes for p in layers.parameters())
    assert mine == saved_nbytes(lambda: layers(batch()), layers) < sum(packed) - 0.9 * parameters


def test_parameters_and_their_views_stay() -> None:
    layer = nn.Linear(8, 8)
    with Bus() as bus:
        with all_of(bus, window=1):
            y = nn.functional.linear(torch.ones(2, 8), layer.weight.t(), layer.bias) * layer.bias
            z = y * layer.weight[0].view(8)
        y_nbytes = y.untyped_storage().nbytes()
        assert bus.nbytes(TO_HOST) == 2 * y_nbytes + 64  # the product, y, and the input
        z.sum().backward()


def test_what_belongs_to_the_model_stays_whatever_is_saved_of_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.register_buffer("mask", torch.ones(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.detach() * self.mask[2:4]

    model, x = Masked(), torch.ones(2, 8, requires_grad=True)
    for known, nbytes in ((model, 0), (None, 8 * 4 + 16 * 8 * 4)):
        with Bus() as bus, all_of(bus, model=known):
            model(x).sum().backward()
            assert bus.nbytes(TO_HOST) == nbytes


def test_small_storages_stay() -> None:
    layers = blocks(dropout=0.3, unfused=True)
    nbytes = saved_nbytes(lambda: layers(batch()), layers, at_least=6000)
    assert 0 < nbytes < saved_nbytes(lambda: layers(batch()), layers)
    plain = gradients(layers, layers)
    with Bus() as bus:
        assert_equal(gradients(layers, layers, offload_activations(bus, min_nbytes=6000)), plain)
        assert bus.nbytes(TO_HOST) == nbytes


def test_scalars_masks_numbers_and_empty_tensors() -> None:
    x = torch.randn(5, 7, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        scale = x.mean()  # a 0-dim tensor
        kept = torch.where(x > 0, x * scale, x.exp())  # saves a mask
        rows = kept[torch.tensor([0, 3, 3, 1])]  # saves numbers
        nothing = x[:0].sin().sum()  # saves an empty tensor
        half = (x.to(torch.bfloat16).sin().float() * kept).sum()  # the size of an element is 2
        return (
            (rows.sin() * scale).sum() + nothing + half + x.to(torch.complex64).conj().abs().sum()
        )

    (plain,) = torch.autograd.grad(fn(x), [x])
    with Bus() as bus:
        with all_of(bus):
            loss = fn(x)
        assert torch.equal(torch.autograd.grad(loss, [x])[0], plain)


def test_sparse_tensors_stay() -> None:
    matrix = torch.eye(4).to_sparse()
    x = torch.randn(4, 4, requires_grad=True)
    with Bus() as bus:
        with all_of(bus):
            loss = torch.sparse.mm(matrix, x).sum()
        loss.backward()
        assert bus.nbytes(TO_HOST) == 0
    assert torch.equal(x.grad, torch.ones(4, 4))


def test_the_devices_memory_is_given_back() -> None:
    """The peak on the device falls to a part, and the host holds what has left."""
    layers = blocks(8, dropout=0.3, unfused=True)
    gradients(layers, layers)
    with Ledger(layers) as without:
        gradients(layers, layers)
    kept = saved_nbytes(lambda: layers(batch()), layers)
    with Bus() as bus:
        offload = all_of(bus, prefetch=1, window=1)
        gradients(layers, layers, offload)
        with Ledger(layers, offload) as with_it:
            gradients(layers, layers, offload)
        assert sum(tensor.nbytes for tensor in offload.host_tensors) == kept
    before, after = (sum(ledger.peak("device").values()) for ledger in (without, with_it))
    assert sum(with_it.peak("host").values()) == kept
    parameters = sum(p.nbytes for p in layers.parameters())
    assert before > parameters + kept  # at the end of forward
    assert after < 2 * parameters + kept / 8  # gradients, and less than one block's activations


def test_in_a_kept_graph_too() -> None:
    layers = blocks(8, dropout=0.3, unfused=True)
    kept = saved_nbytes(lambda: layers(batch()), layers)
    with Bus() as bus:
        offload = all_of(bus, prefetch=1, window=1)
        x = batch()
        with offload:
            loss = layers(x).sum()
        loss.backward(retain_graph=True)
        with Ledger(layers, offload) as ledger:
            loss.backward(retain_graph=True)
        assert (
            sum(ledger.peak("device").values()) - sum(p.nbytes * 2 for p in layers.parameters())
            < kept / 4
        )
        assert bus.nbytes(TO_DEVICE) <= 2 * bus.nbytes(TO_HOST)


class Watched(Bus):
    """Logs what it begins to bring back, and counts what it allocates."""

    def __init__(self) -> None:
        super().__init__(None)
        self.log: list[str] = []
        self.allocated = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.allocated += 1
        return super().empty(numel, dtype)

    def to_device(self, pairs: Any, name: str = "") -> Transfer:
        self.log.append(f"fetch {pairs[0][0][:4].view(torch.float32)[0]:g}")
        return super().to_device(pairs, name)


class Logged(torch.autograd.Function):
    """Saves its input; its backward logs that it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, log: list[str]) -> Tensor:
        ctx.number, ctx.log = number, log
        ctx.save_for_backward(torch.full((4,), float(number)))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        assert saved.tolist() == [ctx.number] * 4
        ctx.log.append(f"use {ctx.number}")
        return grad, None, None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_storages_return_ahead_of_their_use(prefetch: int) -> None:
    y = torch.zeros(4, requires_grad=True)
    with Watched() as bus:
        with all_of(bus, prefetch=prefetch, window=1):
            for number in range(8):
                y = Logged.apply(y, number, bus.log)
        y.sum().backward()
    # 7, the last, is still there when backward asks for it, and nothing after it
    fetched = [f"fetch {number}" for number in range(6, -1, -1)]
    wanted: list[str] = []
    for used in range(7, -1, -1):
        upto = 7 - max(used - prefetch, 0)  # fetches that have begun when `used` is used
        wanted += [f for f in fetched[:upto] if f not in wanted] + [f"use {used}"]
    assert bus.log == wanted


class Lazy(Transfer):
    """Ends when somebody waits for it."""

    def finish(self) -> None:
        self.run()
        self.end(0.0, 0.0)


class LazyBus(Bus):
    """Copies to the host only for those who wait; knows how many have been under way at once."""

    most_leaving = 0

    def to_host(self, pairs: Any, name: str = "") -> Transfer:
        transfer = Lazy(pairs, TO_HOST, name)
        self._note(transfer)
        leaving = [t for t in self.transfers if t.direction == TO_HOST and not t.is_completed()]
        self.most_leaving = max(self.most_leaving, len(leaving))
        return transfer


@pytest.mark.parametrize("window", [1, 2, 5])
def test_no_more_than_the_window_is_under_way(window: int) -> None:
    layers = blocks(2)
    plain = gradients(layers, layers)
    with LazyBus() as bus:
        assert_equal(gradients(layers, layers, all_of(bus, window=window)), plain)
        assert bus.most_leaving == window
        assert bus.calls(TO_DEVICE) == bus.calls(TO_HOST) - window


def test_what_has_not_left_is_used_where_it_is() -> None:
    layers = blocks(1)
    plain = gradients(layers, layers)
    with LazyBus() as bus:
        assert_equal(gradients(layers, layers, all_of(bus, window=99)), plain)
        assert bus.calls(TO_HOST) > 5
        assert bus.calls(TO_DEVICE) == 0


def test_host_buffers_serve_again() -> None:
    layers = blocks(dropout=0.3, unfused=True)
    with Watched() as bus:
        offload = all_of(bus)
        gradients(layers, layers, offload)
        first = bus.allocated
        for _ in range(3):
            gradients(layers, layers, offload)
        assert bus.allocated == first == len(offload.host_tensors)


def test_no_more_host_memory_is_held_than_was_once_used() -> None:
    with Bus() as bus:
        buffers = HostBuffers(bus)
        for nbytes in (100, 50, 170, 30, 200, 199, 1):
            held = [buffers.take(nbytes) for _ in range(3)]
            assert all(buffer.shape == (nbytes,) for buffer in held)
            for buffer in held:
                buffers.give(buffer)
        assert sum(buffer.nbytes for buffer in buffers.tensors) <= 3 * 200


def test_a_buffer_that_is_still_read_is_not_given_away() -> None:
    with Bus(Link(0.2, 1e9)) as bus:
        buffers = HostBuffers(bus)
        buffer = buffers.take(8)
        reader = bus.to_device([(buffer, torch.empty(8, dtype=torch.uint8))])
        buffers.give(buffer, reader)
        assert buffers.take(8) is not buffer
        buffer = buffers.take(8)
        reader.finish()
        buffers.give(buffer, reader)
        assert buffers.take(8) is buffer


def test_a_change_in_place_after_saving_is_an_error() -> None:
    x = batch()
    with Bus() as bus:
        for stays in (False, True):
            with all_of(bus, min_nbytes=10**9 if stays else 0, window=1):
                h = x * 1
                y, z = h.sin(), x * 2
            h.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (y + z).sum().backward()


def test_a_storage_that_was_changed_leaves_again() -> None:
    x = batch()
    with Bus() as bus:
        with all_of(bus, window=1):
            h = x * 1
            before = h.sin()
            h.mul_(2)
            after = h.cos()
        (grad,) = torch.autograd.grad(after.sum(), [x])
        assert torch.equal(grad, -2 * (2 * x).sin())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.sum().backward()


def test_backward_twice_and_in_part() -> None:
    layers = blocks(2, dropout=0.3, unfused=True)
    plain = gradients(layers, layers)
    with Bus(SLOW) as bus:
        x = batch()
        torch.manual_seed(3)
        with all_of(bus):
            loss = layers(x).square().sum()
        first = layers[0].mlp.proj.weight
        torch.autograd.grad(loss, [first], retain_graph=True)
        (grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
        assert torch.equal(grad, plain[1])
        loss.backward()
        assert torch.equal(x.grad, plain[1])


def test_a_gradient_of_a_gradient() -> None:
    x = torch.randn(6, 6, requires_grad=True)

    def penalty(context: Any) -> Tensor:
        with context:
            y = (x @ x.t()).tanh().sum()
            (grad,) = torch.autograd.grad(y, [x], create_graph=True)
            loss = grad.square().sum()
        return torch.autograd.grad(loss, [x])[0]

    with Bus() as bus:
        assert torch.equal(penalty(all_of(bus)), penalty(nullcontext()))


def test_looking_at_what_a_graph_has_saved() -> None:
    x = torch.randn(6, requires_grad=True)
    with Bus() as bus:
        with all_of(bus, window=1):
            y = x.exp().sin().exp()
        assert torch.equal(y.grad_fn._saved_result, y)
        assert torch.equal(y.grad_fn.next_functions[0][0]._saved_self, x.exp())
        y.sum().backward()


@pytest.mark.parametrize("how", ["inside", "around", "both", "nested offloads"])
def test_together_with_checkpoints(how: str) -> None:
    layers = blocks(dropout=0.3, unfused=True)
    plain = gradients(layers, layers)

    def chain(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x)
        return x

    with Bus(SLOW) as bus:
        offload, other = all_of(bus), all_of(bus, min_nbytes=3000)

        def offloaded(x: Tensor) -> Tensor:
            with other:
                return layers(x)

        if how == "inside":
            seen = gradients(lambda x: checkpoint(offloaded, x), layers)
        elif how == "around":
            seen = gradients(chain, layers, offload)
            assert bus.nbytes(TO_HOST) == 3 * batch().nbytes  # the arguments, and nothing else
        elif how == "both":
            seen = gradients(lambda x: checkpoint(offloaded, x), layers, offload)
        else:
            seen = gradients(offloaded, layers, offload)
        assert_equal(seen, plain)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError(x.shape)


def test_an_exception_leaves_nothing_under_way_and_no_thread() -> None:
    layers, before = blocks(2), set(threading.enumerate())
    plain = gradients(layers, layers)
    with Bus(SLOW) as bus:
        offload = all_of(bus)
        failing = nn.Sequential(layers, Fails())
        with pytest.raises(ArithmeticError), offload:
            failing(batch())
        assert all(transfer.is_completed() for transfer in bus.transfers)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

        def fail(grad: Tensor) -> None:
            raise ArithmeticError

        with offload:
            y = layers(batch())
        y.register_hook(fail)
        with pytest.raises(ArithmeticError):
            y.sum().backward()
        assert_equal(gradients(layers, layers, offload), plain)
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(5)
    assert not [thread for thread in started if thread.is_alive()]


def test_a_dropped_graph_gives_its_buffers_back() -> None:
    layers = blocks(2)
    with Bus() as bus:
        offload = all_of(bus)
        for _ in range(3):
            with offload, SavedActivations(layers):
                y = layers(batch())
            del y
        nbytes = saved_nbytes(lambda: layers(batch()), layers)
        assert sum(tensor.nbytes for tensor in offload.host_tensors) == nbytes


@pytest.mark.parametrize(("name", "wrong"), [("min_nbytes", -1), ("prefetch", -1), ("window", 0)])
def test_counts_that_make_no_sense_are_refused(name: str, wrong: int) -> None:
    with Bus() as bus, pytest.raises(ValueError, match=f"{name}={wrong}"):
        offload_activations(bus, **{name: wrong})


def _losses(how: str, offloaded: bool) -> list[float]:
    config = GPTConfig(block_size=12, num_layers=2, num_heads=2, hidden_size=16, dropout=0.1)
    tokens = torch.randint(config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(5))
    model: nn.Module = GPT(config).double()
    inner = model
    if how == "ddp":
        model = DDP(model)
    elif how == "zero3":
        for part in model.blocks:
            fully_shard(part)
        fully_shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with Bus() as bus:
        context = all_of(bus, model=inner) if offloaded else nullcontext()
        for step in range(3):
            torch.manual_seed(step)
            with context:
                loss = model(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert bool(bus.calls(TO_HOST)) == offloaded
    return losses


@pytest.mark.parametrize("how", ["ddp", "zero3"])
def test_under_a_wrapper_of_parallel_training(pool: Any, how: str) -> None:
    alone = _losses("alone", False)
    for losses in pool(2).run(_losses, how, True):
        assert losses == pytest.approx(alone, rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_bit_changes_on_a_gpu(prefetch: int) -> None:
    layers = blocks(4, dropout=0.3, unfused=True).cuda()
    x = torch.randn(64, *SHAPE[1:], device="cuda", requires_grad=True)
    offload = offload_activations(
        bus_of(torch.device("cuda")), min_nbytes=1000, prefetch=prefetch, model=layers
    )
    results = []
    for context in (nullcontext(), offload, offload, offload):
        torch.manual_seed(3)
        with context:
            y = layers(x)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *layers.parameters()])])
    for seen in results[1:]:
        assert_equal(seen, results[0])
    assert all(tensor.is_pinned() for tensor in offload.host_tensors)


@pytest.mark.gpu
def test_the_peak_falls_on_a_gpu() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)))
    layers.cuda()
    x = torch.randn(16384, 1024, device="cuda")  # 64 MiB, saved three times a layer
    offload = offload_activations(bus_of(torch.device("cuda")), prefetch=2, window=2)
    peaks = []
    for context in (nullcontext(), offload, offload):
        layers.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with context:
            loss = layers(x).sum()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del loss
    assert max(peaks[1:]) < 0.5 * peaks[0]
