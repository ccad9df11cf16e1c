"""What users of FSDP and of ZeRO's third stage have run into: `fully_shard` is right there, or
says what to do. Each retells public reports. Where torch's FSDP2 is wrong, it is said.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdt import RankError, Ranks

STEPS = 3


def _x(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64, generator=generator)


def _layers(count: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*parts).double()


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    from pdt.zero import fully_shard

    for part in model.children():
        fully_shard(part, **settings)
    return fully_shard(model, **settings)


def _whole_grads(model: nn.Module) -> list[Tensor | None]:
    """Whole gradients from all ranks' pieces; a parameter's is None where no rank has one."""
    found: list[Tensor | None] = []
    shapes = [p.shape for p in _whole(model)]
    for param, shape in zip(model.parameters(), shapes, strict=True):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, param.grad)
        assert len({part is None for part in parts}) == 1
        found.append(None if parts[0] is None else torch.cat(parts).view(shape))
    return found


def _whole(model: nn.Module) -> list[Tensor]:
    from pdt.zero.zero3 import gathered

    with gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _close(got: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


Step = Callable[[nn.Module, int], object]  # runs the backwards of one step, as a rank


def _steps_of_one_process(make: Callable[[], nn.Module], step: Step, n: int) -> list[list[Any]]:
    """The gradients after each step: the mean of all ranks', None where no rank has one."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rank in range(n):
            step(model, rank)
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= n
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return seen


def _assert_equal_to_one_process(
    ranks: Any, make: Callable[[], nn.Module], step: Step, n: int = 2, **settings: Any
) -> None:
    def run() -> list[list[Any]]:
        model = _shard(make(), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(model, dist.get_rank())
            assert all(p.dim() == 1 for p in model.parameters())
            seen.append(_whole_grads(model))
            optimizer.step()
        return seen

    wanted = _steps_of_one_process(make, step, n)
    for steps in ranks.run(run):
        for got, expected in zip(steps, wanted, strict=True):
            _close(got, expected)


# Other graphs than one forward and one backward


def _two_forwards(m: nn.Module, rank: int) -> None:
    (m(_x(rank)).square().mean() + m(_x(rank + 10)).square().mean()).backward()


def _two_of_each(m: nn.Module, rank: int) -> None:
    a, b = m(_x(rank)), m(_x(rank + 10))
    a.square().mean().backward()
    b.square().mean().backward()


def _retained(m: nn.Module, rank: int) -> None:
    y = m(_x(rank)).square().mean()
    y.backward(retain_graph=True)
    y.backward()


def _accumulated(m: nn.Module, rank: int) -> None:
    for i in range(4):
        m(_x(rank + 10 * i)).square().mean().backward()


def _accumulated_without_sync(m: nn.Module, rank: int) -> None:
    from pdt.zero.unit import KEY
    from pdt.zero.zero3 import no_sync

    if KEY not in m.__dict__:
        return _accumulated(m, rank)
    with no_sync(m):
        for i in range(3):
            m(_x(rank + 10 * i)).square().mean().backward()
            assert all(p.grad is None for p in m.parameters())
    m(_x(rank + 30)).square().mean().backward()


def _with_evaluation(m: nn.Module, rank: int) -> None:
    with torch.no_grad():
        m(_x(rank))
    y = m(_x(rank)).square().mean()
    with torch.inference_mode():
        m(_x(rank))
    y.backward()


def _unused_output(m: nn.Module, rank: int) -> None:
    m(_x(rank + 1))  # nobody goes back through this one
    m(_x(rank).requires_grad_()).square().mean().backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "step",
    [
        _two_forwards,
        _two_of_each,
        _retained,
        _accumulated,
        _accumulated_without_sync,
        _with_evaluation,
        _unused_output,
    ],
)
def test_every_backward_is_reduced(pool: Any, step: Step, reshard: bool) -> None:
    _assert_equal_to_one_process(pool(2), _layers, step, reshard_after_forward=reshard)


@pytest.mark.parametrize("step", [_accumulated, _accumulated_without_sync])
def test_accumulation_is_right_on_one_rank_and_on_three(pool: Any, step: Step) -> None:
    for n in (1, 3):
        _assert_equal_to_one_process(pool(n), _layers, step, n)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, around: str) -> None:
        super().__init__()
        self.a, self.b, self.c = _layers(3)
        self.use_reentrant, self.around = use_reentrant, around

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.around == "a unit, twice":
            for _ in range(2):
                x = checkpoint(self.b, torch.tanh(x), use_reentrant=self.use_reentrant)
        else:
            x = checkpoint(
                lambda x: torch.tanh(self.c(self.b(x))), x, use_reentrant=self.use_reentrant
            )
        return self.c(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("around", ["a unit, twice", "two units"])
def test_checkpointed_units(pool: Any, use_reentrant: bool, around: str) -> None:
    def step(model: nn.Module, rank: int) -> None:
        model(_x(rank)).square().mean().backward()

    _assert_equal_to_one_process(pool(2), lambda: Checkpointed(use_reentrant, around), step)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_root(pool: Any, use_reentrant: bool) -> None:
    def step(model: nn.Module, rank: int) -> None:
        x = _x(rank).requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()

    _assert_equal_to_one_process(pool(2), _layers, step)


class Skips(nn.Module):
    """`plan(step, rank)` names the units that are used."""

    def __init__(self, plan: Callable[[int, int], str]) -> None:
        super().__init__()
        self.a, self.b, self.c = _layers(3)
        self.plan, self.calls = plan, 0

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for name in self.plan(self.calls, rank):
            x = self._modules[name](x)  # type: ignore[misc]
        return x


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(
    "plan",
    [
        lambda step, rank: "ac" if step == 1 else "abc",  # on all ranks
        lambda step, rank: "ac" if step == 1 + rank else "abc",  # on one in turn
        lambda step, rank: "ab" if step > 0 and rank else "abc",  # the last one, on one
        lambda step, rank: "abc" if step > 0 else "ac",  # one that comes later
        lambda step, rank: "abcb" if step > 0 else "abc",  # a second use that comes later
    ],
    ids=["skipped", "skipped in turn", "last skipped", "added", "used again"],
)
def test_units_that_are_skipped(pool: Any, plan: Any, prefetch: int) -> None:
    """DeepSpeed: an error or a hang once the recorded order is left; torch: a hang where ranks
    differ."""

    def step(model: Any, rank: int) -> None:
        model(_x(rank), rank).square().mean().backward()

    def run() -> list[list[Any]]:
        from pdt.zero.zero3 import set_prefetch

        model: Any = _shard(Skips(plan))
        set_prefetch(model, prefetch)
        seen = []
        for model.calls in range(STEPS):
            model.zero_grad()
            step(model, dist.get_rank())
            seen.append(_whole_grads(model))
        return seen

    alone, wanted = Skips(plan), []
    for alone.calls in range(STEPS):
        alone.zero_grad()
        for rank in range(2):
            step(alone, rank)
        wanted.append([None if p.grad is None else p.grad / 2 for p in alone.parameters()])
    for steps in pool(2).run(run):
        for got, expected in zip(steps, wanted, strict=True):
            _close(got, expected)


def test_ranks_that_use_units_in_another_order_are_told_so() -> None:
    """torch: mixes the parameters of units of equal size, silently."""

    def run() -> None:
        model = _shard(Skips(lambda step, rank: "acb" if rank else "abc"))
        model(_x(0), dist.get_rank()).sum().backward()

    with (
        Ranks(2) as ranks,
        pytest.raises(RankError, match=r"rank 0 would gather 'b'; rank 1 would gather 'c'"),
    ):
        ranks.run(run)


def test_frozen_parts_have_no_gradient_and_are_freed(pool: Any) -> None:
    def make(frozen: int) -> nn.Module:
        model = _layers(3)
        model[frozen].requires_grad_(False)
        return model

    def step(model: nn.Module, rank: int) -> None:
        model(_x(rank)).square().mean().backward()
        assert all(p.untyped_storage().nbytes() < 8 * 20 for p in model.parameters())

    for frozen in range(3):
        ranks = pool(2)
        _assert_equal_to_one_process(
            ranks,
            lambda frozen=frozen: make(frozen),
            lambda m, r: m(_x(r)).square().mean().backward(),
        )

        def run(frozen: int) -> None:
            step(_shard(make(frozen)), dist.get_rank())

        ranks.run(run, frozen)


def test_all_frozen_but_the_input(pool: Any) -> None:
    def run() -> Tensor:
        model = _shard(_layers().requires_grad_(False))
        x = _x(0).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        assert all(p.grad is None and p.dim() == 1 for p in model.parameters())
        return x.grad

    x = _x(0).requires_grad_()
    _layers().requires_grad_(False)(x).square().mean().backward()
    for grad in pool(2).run(run):
        _close([grad], [x.grad])


# Parameters of all forms


class Odd(nn.Module):
    """Transposed, channels_last, 0-dim, complex, bf16 and fp64 in one unit.

    torch: refuses 0-dim, transposed and mixed dtypes, the last with an assertion.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.transposed = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)
        self.complex = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
        self.low = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = (self.transposed @ x.t()).sum() * self.scale
        z = self.conv(x.sum().expand(1, 2, 4, 4).contiguous()).sum()
        w = (self.complex * x.sum()).abs().square().sum()
        return y + z + w + (self.low * 2).sum().double()


def test_parameters_of_all_forms_in_one_unit(pool: Any) -> None:
    def run() -> None:
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import gathered

        model, alone = fully_shard(Odd()), Odd()
        for rank in range(2):
            alone(_x(rank)).backward()
        for _ in range(2):
            model.zero_grad()
            model(_x(dist.get_rank())).backward()
            grads = _whole_grads_in_memory_order(model)
            with gathered(model):
                for got, param, ours in zip(
                    grads, alone.parameters(), model.parameters(), strict=True
                ):
                    assert param.grad is not None
                    assert (param.shape, param.stride()) == (ours.shape, ours.stride())
                    wanted = (param.grad / 2).as_strided((param.numel(),), (1,))
                    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)

    pool(2).run(run)


def _whole_grads_in_memory_order(model: nn.Module) -> list[Tensor]:
    found = []
    for param in model.parameters():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, param.grad)
        found.append(torch.cat(parts))
    return found


def test_fewer_elements_than_ranks(pool: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 1, bias=False)).double()

    def step(model: nn.Module, rank: int) -> None:
        model(_x(rank, 5, 3)).square().mean().backward()

    _assert_equal_to_one_process(pool(4), make, step, 4)


def test_a_parameter_without_gradient_on_any_rank_is_left_alone(pool: Any) -> None:
    def run() -> None:
        model = _shard(Skips(lambda step, rank: "ac" if rank else "a"))
        with torch.no_grad():
            before = _whole(model)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        model.plan = lambda step, rank: "abc"  # type: ignore[assignment]
        model(_x(0), 0).sum().backward()
        optimizer.zero_grad()
        model.plan = lambda step, rank: "ac" if rank else "a"  # type: ignore[assignment]
        model(_x(0), dist.get_rank()).sum().backward()
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, _whole(model), strict=True)]
        assert changed == [True, True, False, False, True, True]

    pool(2).run(run)


# The optimizer


@pytest.mark.parametrize("when", ["before sharding", "after sharding", "after a forward"])
def test_an_optimizer_built_at_any_time_steps_the_parameters(pool: Any, when: str) -> None:
    """torch: silently steps nothing when it was built before sharding or after a forward."""

    def run() -> list[Tensor]:
        model = _layers()
        if when == "before sharding":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _shard(model)
        if when == "after a forward":
            model(_x(0))
        if when != "before sharding":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(_x(dist.get_rank())).square().mean().backward()
        optimizer.step()
        return _whole(model)

    alone = _layers()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    (sum(alone(_x(rank)).square().mean() for rank in range(2)) / 2).backward()
    optimizer.step()
    for found in pool(2).run(run):
        _close(found, [p.detach() for p in alone.parameters()])


def test_a_step_between_forward_and_backward_is_refused_by_autograd(pool: Any) -> None:
    def run() -> None:
        model = _shard(_layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(_x(0)).sum().backward()
        loss = model(_x(0)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        model(_x(0)).sum().backward()

    pool(2).run(run)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_that_of_the_whole_gradient(pool: Any, norm_type: float) -> None:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()

    def run() -> tuple[Tensor, list[Any]]:
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import clip_grad_norm_

        model = make()
        fully_shard(model[0], resident_numel=5)
        fully_shard(model)
        model(_x(dist.get_rank())).square().sum().backward()
        norm = clip_grad_norm_(model, 0.1, norm_type)
        bias = model[0].bias
        assert bias.grad.shape == (5,)  # whole on every rank, and counted once
        first, _, last = _whole_grads_in_memory_order(model)
        return norm, [first, last]

    for n in (2, 4):
        alone = make()
        (sum(alone(_x(rank)).square().sum() for rank in range(n)) / n).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
        wanted = [p.grad.flatten() for p in alone.parameters() if p.grad.dim() == 2]
        for found, grads in pool(n).run(run):
            torch.testing.assert_close(found, norm, rtol=0, atol=1e-12)
            _close(grads, wanted)


def test_resident_parameters_stay_whole_and_equal(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.comm.meter import meter
        from pdt.zero import fully_shard

        model = _layers()
        for part in model:
            fully_shard(part, resident_numel=4)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with meter() as records:
                model(_x(dist.get_rank())).square().mean().backward()
            assert all(
                (p.dim() == 1) and (p.numel() == 4 or p.numel() == 8) for p in model.parameters()
            )
            optimizer.step()
        assert records.total("all_reduce").calls == 2  # what has a gradient; all biases
        return _whole(model)

    alone = _layers()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(alone(_x(rank)).square().mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    for found in pool(2).run(run):
        _close(found, [p.detach() for p in alone.parameters()])


# Low precision


@pytest.mark.slow
def test_sums_in_fp32_do_not_stop_at_256(pool: Any) -> None:
    """torch: 256 with bf16 sums."""

    def run() -> float:
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import no_sync

        model = nn.Linear(1, 1, bias=False)
        fully_shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with no_sync(model):
            for _ in range(599):
                model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
        return sum(float(g) for g in model.weight.grad)

    assert sum(pool(2).run(run)) == 600


def test_a_parameter_that_only_the_last_micro_batch_uses(pool: Any) -> None:
    """torch: an assertion about dtypes."""

    def run() -> list[Any]:
        from pdt.zero.zero3 import no_sync

        model: Any = Skips(lambda step, rank: "a").float()
        _shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with no_sync(model):
            model(torch.ones(1, 4), 0).sum().backward()
        model.plan = lambda step, rank: "ab"
        model(torch.ones(1, 4), 0).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        return [p.grad is not None for p in model.parameters()]

    assert pool(2).run(run) == [[True] * 4 + [False] * 2] * 2


def test_fp16_gradients_do_not_overflow_in_the_sum(pool: Any) -> None:
    def run() -> float:
        from pdt.zero import fully_shard

        model = nn.Linear(1, 2, bias=False).half()
        fully_shard(model)
        model(torch.full((1, 1), 6e4, dtype=torch.float16)).sum().backward()
        return float(model.weight.grad[0])

    assert pool(2).run(run) == [6e4 // 32 * 32] * 2


def test_master_shards_are_fp32_and_what_is_computed_and_sent_is_bf16(pool: Any) -> None:
    def run() -> None:
        from pdt.comm.meter import meter
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import gathered

        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        before = model.weight.detach().clone()
        fully_shard(model, param_dtype=torch.bfloat16)
        assert torch.equal(_whole(model)[0], before)
        for _ in range(2):
            with meter() as records:
                y = model(torch.randn(2, 8))
                assert y.dtype == torch.bfloat16
                y.sum().backward()
        assert model.weight.dtype == model.weight.grad.dtype == torch.float32
        assert records.total("send").wire_nbytes == 2 * 64 * 2 / 2
        with gathered(model, writeback=True):
            model.weight.data[0, 0] = 1 + 2**-20
        assert torch.equal(_whole(model)[0].view(-1)[1:], before.view(-1)[1:])
        assert _whole(model)[0][0, 0] == 1 + 2**-20

    pool(2).run(run)


# Entering otherwise, and what is refused


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0, dtype=torch.float64).view(4, 4) / 16)

    def forward(self) -> Tensor:
        return self.weight.square().mean()

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x @ self.weight * scale


def test_a_forward_without_arguments(pool: Any) -> None:
    _assert_equal_to_one_process(
        pool(2), lambda: nn.Sequential(Methods())[0], lambda m, r: m().backward()
    )


def test_a_registered_method_is_entered_as_forward(pool: Any) -> None:
    def run() -> list[Any]:
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import register_forward_method

        model: Any = Methods()
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"weight.*register_forward_method"):
            model.encode(_x(0))
        register_forward_method(model, "encode")
        for _ in range(2):
            model.zero_grad()
            model.encode(_x(dist.get_rank()), scale=2.0).square().mean().backward()
        return _whole_grads(model)

    alone = Methods()
    (sum(alone.encode(_x(r), scale=2.0).square().mean() for r in range(2)) / 2).backward()
    for found in pool(2).run(run):
        _close(found, [alone.weight.grad])


def test_a_piece_is_not_taken_for_the_whole(pool: Any) -> None:
    """Where a graph is built on it, also where the shapes would allow it."""

    def run() -> None:
        model = _shard(_layers(2, 2))  # a piece of the weight has as many elements as a row
        weight: Any = model.get_parameter("0.0.weight")
        for use in (
            lambda: nn.functional.linear(_x(0, 3, 2), weight[:2]),
            lambda: (weight * 2).sum(),
            lambda: weight.norm(),
            lambda: torch.stack([weight, weight]),
            lambda: torch.autograd.grad(model(_x(0, 3, 2)).sum(), [weight]),
        ):
            with pytest.raises(RuntimeError, match=r"0\.weight is sharded.*gathered"):
                use()
        assert float(weight.detach().norm()) > 0
        with torch.no_grad():
            assert float(weight.norm()) > 0
            weight.mul_(1.0)

    pool(2).run(run)


def test_gathered_writes_back_what_lies_in_each_ranks_shard(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.zero.zero3 import gathered

        model = _shard(_layers())
        before = _whole(model)
        with gathered(model), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        _close(_whole(model), before)
        with gathered(model, writeback=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(dist.get_rank())
        return _whole(model)

    for found in pool(2).run(run):
        flat = torch.cat([p.flatten() for p in found[:2]])
        assert flat.tolist() == [0.0] * 10 + [1.0] * 10
    # and a backward in it is refused, since gradients would be whole where pieces are wanted

    def backward() -> None:
        from pdt.zero.zero3 import gathered

        model = _shard(_layers())
        with gathered(model), pytest.raises(RuntimeError, match="leave the block"):
            model(_x(0)).sum().backward()
        model(_x(0)).sum().backward()

    pool(2).run(backward)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_leaves_no_trace(pool: Any, where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("here")

    def run() -> list[Any]:
        model: Any = _shard(_layers())
        for broken in (0, 1, 2, 1):
            model(_x(dist.get_rank())).square().mean().backward()  # accumulates
            if where == "forward":
                handle = model[broken][1].register_forward_hook(fail)
            else:
                handle = model[broken][0].register_full_backward_hook(fail)
            with pytest.raises(ValueError, match="here"):
                model(_x(5).requires_grad_()).sum().backward()
            handle.remove()
            assert all(p.dim() == 1 and p.grad.shape == p.shape for p in model.parameters())
        model.zero_grad()
        model(_x(dist.get_rank())).square().mean().backward()
        return _whole_grads(model)

    alone = _layers()
    (sum(alone(_x(rank)).square().mean() for rank in range(2)) / 2).backward()
    for found in pool(2).run(run):
        _close(found, [p.grad for p in alone.parameters()])


def test_copies_and_replaced_memory_are_refused(pool: Any) -> None:
    def run() -> None:
        model = _shard(_layers())
        with pytest.raises(RuntimeError, match="before fully_shard"):
            copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="gathered"):
            pickle.dumps(model)
        model.float()
        with pytest.raises(RuntimeError, match=r"0\.weight was replaced after fully_shard"):
            model(_x(0))
        other: Any = _shard(_layers())
        other[1][0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        with pytest.raises(RuntimeError, match=r"'weight' of unit '1' was replaced"):
            other(_x(0))

    pool(2).run(run)


def test_parts_come_before_what_holds_them(pool: Any) -> None:
    def run() -> None:
        from pdt.zero import fully_shard

        model = fully_shard(_layers())
        with pytest.raises(ValueError, match="parts first"):
            fully_shard(model.get_submodule("0"))
        with pytest.raises(ValueError, match="once"):
            fully_shard(model)

    pool(2).run(run)


def test_models_that_differ_are_named_on_every_rank(pool: Any) -> None:
    def run() -> None:
        from pdt.zero import fully_shard

        with pytest.raises(ValueError, match=r"rank 0 holds parameter weight \(4, 4\).*rank 1"):
            fully_shard(nn.Linear(4 + dist.get_rank(), 4))

    pool(2).run(run)


def test_a_module_that_alters_its_input_in_place(pool: Any) -> None:
    """torch: refused, its hook's output being a view of a custom function."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3)]
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4)), *parts).double()

    def step(model: nn.Module, rank: int) -> None:
        model(_x(rank)).square().mean().backward()

    _assert_equal_to_one_process(pool(2), make, step)


def test_a_model_on_meta_is_filled_one_unit_at_a_time(pool: Any) -> None:
    """As built whole, while no rank holds more than one unit and its shards."""

    def run() -> None:
        from pdt.measure.memory import Ledger
        from pdt.zero import fully_shard
        from pdt.zero.deferred import materialize

        def build() -> nn.Sequential:
            parts = [nn.Linear(32, 32), nn.BatchNorm1d(32)]
            return nn.Sequential(*parts, *[nn.Linear(32, 32, bias=False) for _ in range(4)])

        torch.manual_seed(dist.get_rank())
        whole = build()
        _shard(whole)
        with torch.device("meta"):
            model = build()
        before = list(model.parameters())
        for part in model:
            fully_shard(part)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        with Ledger(model=model) as ledger:
            materialize(model, "cpu")
        assert ledger.peak("cpu")["parameters"] <= 4 * (5 * 1024 + 96) // 2 + 2 * 4 * 1056
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        _close(_whole(model), _whole(whole))
        _close(list(model.buffers()), list(whole.buffers()))
        model(torch.randn(3, 32)).sum().backward()
        optimizer.step()
        assert not torch.equal(_whole(model)[0], _whole(whole)[0])

    pool(2).run(run)


def test_units_without_a_common_root(pool: Any) -> None:
    def run() -> tuple[list[Any], Tensor]:
        from pdt.zero import fully_shard
        from pdt.zero.zero3 import clip_grad_norm_, no_sync

        model = _layers(2)
        fully_shard(model[0])
        with pytest.raises(ValueError, match=r"1\.0\.weight is in no unit"):
            clip_grad_norm_(model, 1.0)
        fully_shard(model[1])
        x = _x(dist.get_rank())
        for _ in range(2):
            model.zero_grad()
            with no_sync(model):
                model(x).square().mean().backward()
                assert all(p.grad is None for p in model.parameters())
            model(x).square().mean().backward()
        return _whole_grads(model), clip_grad_norm_(model, 1e9)

    alone = _layers(2)
    sum(alone(_x(rank)).square().mean() for rank in range(2)).backward()  # twice the mean
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    for found, found_norm in pool(2).run(run):
        _close(found, [p.grad for p in alone.parameters()])
        torch.testing.assert_close(found_norm, norm, rtol=0, atol=1e-12)


def test_optimizers_take_their_fast_path_for_pieces() -> None:
    """On a GPU; torch lists DTensor in the same two places."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utilities

    from pdt.zero.sharded_parameter import ShardedParameter

    assert ShardedParameter in of_optimizers
    assert ShardedParameter in of_utilities
