"""Checkpointing changes no bit of a result, keeps the arguments, and runs the rest once more."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from pdt.ddp import DDP
from pdt.measure import Ledger, SavedActivations, saved_activations
from pdt.model import GPT, GPTConfig
from pdt.model.gpt import Block
from pdt.offload.checkpoint import checkpoint
from pdt.offload.selective import MODES, recompute_blocks
from pdt.zero import fully_shard

torchs = partial(torchs_checkpoint, use_reentrant=False)
CONFIG = GPTConfig(
    block_size=12, num_layers=3, num_heads=2, hidden_size=16, dropout=0.2, unfused=True
)


def block(**options: Any) -> Block:
    torch.manual_seed(1)
    return Block(GPTConfig(block_size=12, num_heads=2, hidden_size=16, **options))


def batch(seed: int = 2) -> Tensor:
    return torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(fn: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    """The result, every gradient, and what the random stream gives next."""
    module.zero_grad()
    x = batch()
    torch.manual_seed(3)
    y = fn(x)
    y.square().sum().backward()
    params = [p.grad for p in module.parameters() if p.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *params, torch.rand(3)]


def assert_equal(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    assert all(map(torch.equal, some, others))


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.3, "unfused": True}, {"dropout": 0.3}, {"bias": False}]
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    layer = block(**options)
    assert_equal(gradients(partial(checkpoint, layer), layer), gradients(layer, layer))


def test_the_random_stream_outside_is_not_moved_by_backward() -> None:
    layer, x = block(dropout=0.3, unfused=True), batch()
    y = checkpoint(layer, x)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_graph_keeps_the_arguments_alone() -> None:
    layer = block(dropout=0.3, unfused=True)
    with SavedActivations(layer) as kept:
        x = batch()
        y = checkpoint(layer, x)
        assert kept.nbytes == x.nbytes
        theirs = torchs(layer, x)
        assert kept.nbytes == x.nbytes  # the same storage
        del y, theirs
        assert kept.nbytes == 0


class Operations(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def products(fn: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Matrix products in forward and in backward."""
    x = batch()
    with Operations() as forward:
        y = fn(x)
    with Operations() as backward:
        y.sum().backward()
    kinds = ("aten.addmm", "aten.bmm", "aten.mm")
    first, second = (sum(n.startswith(kinds) for n in ops.names) for ops in (forward, backward))
    return first, second


def test_runs_again_what_torchs_runs_again() -> None:
    """The last product of a block is not among it: nobody needs its result."""
    layer = block(unfused=True)
    forward, backward = products(layer)
    mine, theirs = (products(partial(check, layer)) for check in (checkpoint, torchs))
    assert mine == theirs == (forward, backward + forward - 1)


def test_arguments_of_any_form_come_again() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def fn(x: Tensor, how: str, *, parts: dict[str, Any], scale: float) -> dict[str, Any]:
        assert how == "with care"
        y = torch.tanh(x @ weight) * scale
        return {"y": [y.exp(), (parts["mask"] & parts["more"][0]) * y.sin()], "n": parts["n"]}

    results = []
    for call in (checkpoint, lambda fn, *args, **kwargs: fn(*args, **kwargs)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        weight.grad = None
        mask = torch.arange(12).view(3, 4) % 2 == 0
        parts = {"mask": mask, "more": (mask.roll(1, 0), None), "n": 7}
        out = call(fn, x, "with care", parts=parts, scale=0.5)
        assert out["n"] == 7
        sum(y.sum() for y in out["y"]).backward()
        results.append([x.grad, weight.grad])
    assert_equal(*results)


def test_inputs_without_gradients_are_enough() -> None:
    layer, x = block(), batch().detach()
    checkpoint(layer, x).sum().backward()
    mine = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    assert_equal(mine, [p.grad for p in layer.parameters()])


def test_nothing_that_needs_a_gradient_keeps_nothing() -> None:
    layer = block().requires_grad_(False)
    assert saved_activations(lambda: checkpoint(layer, batch().detach())) == []
    with torch.no_grad():
        assert checkpoint(block(), batch()).grad_fn is None


def test_checkpoints_inside_checkpoints() -> None:
    layers = nn.Sequential(*(block(dropout=0.3, unfused=True) for _ in range(4)))
    calls = 0

    def inner(i: int, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return layers[i](x)

    def pair(i: int, x: Tensor) -> Tensor:
        return checkpoint(inner, i + 1, checkpoint(inner, i, x))

    def all_of(x: Tensor) -> Tensor:
        return checkpoint(pair, 2, checkpoint(pair, 0, x))

    seen = gradients(all_of, layers)
    # forward 4; a pair again needs the second's input, so the first alone; then each once
    assert calls == 4 + 2 + 4
    assert_equal(seen, gradients(layers, layers))


def test_a_module_twice_in_one_function_and_in_two() -> None:
    layer = block(dropout=0.3, unfused=True)

    def twice(x: Tensor) -> Tensor:
        return layer(checkpoint(layer, layer(x)))

    def four_times(x: Tensor) -> Tensor:
        return checkpoint(twice, checkpoint(layer, x))

    seen = gradients(four_times, layer)
    assert_equal(seen, gradients(lambda x: layer(layer(layer(layer(x)))), layer))


def test_backward_twice_gives_twice_the_gradient() -> None:
    layer, x = block(dropout=0.3, unfused=True), batch()
    loss = checkpoint(layer, x).sum()
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, 2 * first)


def test_a_gradient_of_a_gradient() -> None:
    layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()

    def penalised(fn: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        x = x.detach().double().requires_grad_()
        layer.zero_grad()
        (grad,) = torch.autograd.grad(fn(x).square().sum(), [x], create_graph=True)
        grad.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    assert_equal(penalised(partial(checkpoint, layer), batch()), penalised(layer, batch()))


def test_a_gradient_inside_the_function() -> None:
    layer = nn.Linear(16, 16)

    def fn(x: Tensor) -> Tensor:
        inside = layer(x).tanh()
        (grad,) = torch.autograd.grad(inside.sum(), [x], create_graph=True)
        return inside * grad.exp()

    assert_equal(gradients(partial(checkpoint, fn), layer), gradients(fn, layer))


class LooksTwice(torch.autograd.Function):
    """Reads what it has saved in two places, as many do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1] + 0 * ctx.saved_tensors[0]


def test_a_function_may_read_what_it_saved_twice() -> None:
    layer = nn.Linear(16, 16)
    fn = nn.Sequential(layer, nn.Tanh())
    assert_equal(
        gradients(partial(checkpoint, lambda x: LooksTwice.apply(fn(x))), layer),
        gradients(lambda x: LooksTwice.apply(fn(x)), layer),
    )


def test_autocast_is_as_it_was() -> None:
    layer, dtypes = nn.Linear(16, 16), []

    def fn(x: Tensor) -> Tensor:
        y = layer(x)
        dtypes.append(y.dtype)
        with torch.autocast("cpu", enabled=False):
            z = layer(x)
        return y.float().sin() + z.sin()

    def under_autocast(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fn(x)

    mine = gradients(partial(under_autocast, partial(checkpoint, fn)), layer)
    assert dtypes == [torch.bfloat16] * 2
    assert_equal(mine, gradients(partial(under_autocast, fn), layer))


@pytest.mark.parametrize("call", [checkpoint, torchs])
def test_another_number_of_tensors_is_an_error(call: Callable[..., Any]) -> None:
    again = False

    def moody(x: Tensor) -> Tensor:
        return x.sin().cos() if again else x.sin().cos().tanh().exp()

    y = call(moody, batch())
    again = True
    with pytest.raises(RuntimeError) as raised:
        y.sum().backward()
    if call is checkpoint:
        assert "moody: run again, it saved 2 tensors for backward, and in forward 4" in str(
            raised.value
        )


def test_another_shape_or_dtype_is_an_error() -> None:
    count = 0

    def growing(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return (x.sum() * torch.ones(2 + count)).sum()

    y = checkpoint(growing, batch())
    text = r"growing: run again, it saved \(4,\) of torch.float32 on cpu .*in forward \(3,\)"
    with pytest.raises(RuntimeError, match=text):
        y.backward()


def test_an_argument_changed_in_place_is_an_error() -> None:
    x = batch()
    h = x * 1
    y = checkpoint(lambda h: h.sin().exp(), h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_change_in_place_inside_is_an_error_where_autograd_finds_one() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()  # its result is needed for its gradient
        return y.add_(1).sin()

    for call in (checkpoint, lambda fn, x: fn(x)):
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            call(fn, batch()).sum().backward()


def test_a_change_in_place_that_harms_nothing_is_allowed() -> None:
    layer = nn.Linear(16, 16)

    def fn(x: Tensor) -> Tensor:
        return F.relu_(layer(x)).mul(2).add_(1).sin()

    assert_equal(gradients(partial(checkpoint, fn), layer), gradients(fn, layer))


def test_an_exception_in_the_function_leaves_nothing() -> None:
    def fails(x: Tensor) -> Tensor:
        y = x.sin()
        raise ArithmeticError(y.shape)

    with pytest.raises(ArithmeticError):
        checkpoint(fails, batch())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_end_of_a_recomputation_is_not_caught_by_the_function() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return x.sin().exp()
        except Exception:
            return x

    x = batch()
    checkpoint(careful, x).sum().backward()
    assert torch.equal(x.grad, (x.sin().exp() * x.cos()).detach())


def test_what_comes_back_is_freed_as_it_is_used() -> None:
    """The peak is one block's activations, not two; a graph that is kept does not keep them."""
    layers = nn.Sequential(*(block(dropout=0.3, unfused=True) for _ in range(6)))
    x = batch()
    one = sum(tensor.nbytes for tensor in saved_activations(layers[0], x, model=layers))
    for retain in (False, True):
        with Ledger(layers) as ledger:
            y = x
            for layer in layers:
                y = checkpoint(layer, y)
            y.sum().backward(retain_graph=retain)
            kept = ledger.live()["activations"]
        assert ledger.peak()["activations"] < 1.1 * one + 6 * x.nbytes
        assert kept <= (6 * x.nbytes if retain else 0)
        del y


def test_what_a_partial_backward_does_not_use_is_freed_at_its_end() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        used, unused = x @ weights[0], x @ weights[1]
        seen.append(weakref.ref(unused.untyped_storage()))
        return unused.cos() + used.sin()

    loss = checkpoint(fn, torch.randn(4, 4, requires_grad=True)).sum()
    torch.autograd.grad(loss, [weights[0]], retain_graph=True)
    assert [ref() for ref in seen] == [None, None]


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    x = batch()
    argument = x * 1
    ref = weakref.ref(argument.untyped_storage())
    y = checkpoint(block(), argument)
    del argument
    gc.disable()  # no cycle may hold it
    try:
        assert ref() is not None
        del y
        assert ref() is None
    finally:
        gc.enable()


def model_and_batch() -> tuple[GPT, Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab_size, (2, 13), generator=torch.Generator().manual_seed(5))
    return GPT(CONFIG), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("unfused", [True, False])
def test_what_a_model_recomputes_changes_no_bit(unfused: bool) -> None:
    _, tokens, targets = model_and_batch()
    results, kept = {}, {}
    for mode in (*MODES, "none"):  # and back
        model = recompute_blocks(GPT(GPTConfig(**{**vars(CONFIG), "unfused": unfused})), "full")
        recompute_blocks(model, mode)
        torch.manual_seed(3)
        with SavedActivations(model) as saved:
            loss = model(tokens, targets)
            kept[mode] = saved.nbytes
        loss.backward()
        results[mode] = [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(2)]
        assert_equal(results[mode], results["none"])
    assert kept["full"] < kept["selective"] < kept["none"]


def test_a_copy_of_a_model_recomputes_with_its_own_parameters() -> None:
    model, tokens, targets = model_and_batch()
    twin = copy.deepcopy(recompute_blocks(model, "full"))
    twin(tokens, targets).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    recompute_blocks(twin, "none")
    assert "forward" not in vars(twin.blocks[0])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode='some' is none of none, selective, full"):
        recompute_blocks(GPT(CONFIG), "some")


class Checkpointed(nn.Module):
    """One layer twice, another once, between layers outside of checkpoints."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.first, self.layer, self.last = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.call(self.layer, torch.tanh(x))
        return self.last(self.call(self.last, x))


def _plain(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def _shard(model: nn.Module) -> nn.Module:
    for part in model.children():
        fully_shard(part)
    return fully_shard(model)


def _torchs_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _losses(wrap: Callable[[nn.Module], nn.Module], call: Callable[..., Any]) -> list[float]:
    model = wrap(Checkpointed(call))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", [_torchs_ddp, DDP, _shard])
def test_under_a_wrapper_of_parallel_training(pool: Any, wrap: Callable[..., nn.Module]) -> None:
    alone = _losses(lambda model: model, _plain)
    for losses in pool(2).run(_losses, wrap, checkpoint):
        assert losses == pytest.approx(alone, rel=1e-12)


def _gpt_losses(sharded: bool, mode: str) -> list[float]:
    model, tokens, targets = model_and_batch()
    recompute_blocks(model.double(), mode)
    if sharded:
        for part in model.blocks:
            fully_shard(part)
        fully_shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_sharded_blocks_that_recompute(pool: Any, mode: str) -> None:
    alone = _gpt_losses(False, "none")
    for losses in pool(2).run(_gpt_losses, True, mode):
        assert losses == pytest.approx(alone, rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_no_bit_changes_on_a_gpu(autocast: bool) -> None:
    layer = block(dropout=0.3, unfused=True).cuda()
    x = batch().detach().cuda().requires_grad_()
    results = []
    for fn in (layer, partial(checkpoint, layer)):
        layer.zero_grad()
        torch.manual_seed(3)
        context = torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext()
        with context:
            y = fn(x)
        (grad,) = torch.autograd.grad(y.float().sum(), [x])
        results.append([y, grad, torch.rand(3, device="cuda")])
    assert_equal(*results)
