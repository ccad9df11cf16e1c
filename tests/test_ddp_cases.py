"""What users of DDP have run into: DDP is right there, or says in the same step which parameter.

Each retells public reports of PyTorch's users. Where torch's DDP is silently wrong, it is said.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdt import RankError, Ranks


def _x(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _linear(n: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(n, n).double()


def _mean_of_ranks(loss: Any, make: Any, n: int) -> list[Tensor]:
    """The gradients of one process that has all ranks' losses: their mean."""
    module = make()
    (sum(loss(module, rank) for rank in range(n)) / n).backward()
    return [p.grad for p in module.parameters()]


def _close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# Other graphs than one forward and one backward


def _two_backwards(m: nn.Module, rank: int) -> None:  # torch: the second is not reduced
    a, b = m(_x(rank, 3, 4)), m(_x(rank + 10, 3, 4))
    a.square().mean().backward()
    b.square().mean().backward()


def _retained(m: nn.Module, rank: int) -> None:  # torch: the second is not reduced
    y = m(_x(rank, 3, 4)).square().mean()
    y.backward(retain_graph=True)
    y.backward()


def _two_forwards(m: nn.Module, rank: int) -> None:
    (m(_x(rank, 3, 4)).square().mean() + m(_x(rank + 10, 3, 4)).square().mean()).backward()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("go", [_two_backwards, _retained, _two_forwards])
def test_every_backward_is_reduced(pool: Any, go: Any, world_size: int) -> None:
    def run() -> list[list[Tensor]]:
        from pdt.ddp import DDP

        model, rank = DDP(_linear(), bucket_cap_mb=0, first_bucket_mb=0), dist.get_rank()
        seen = []
        for _ in range(3):  # the first step learns, the others send as buckets fill
            model.zero_grad()
            go(model, rank)
            seen.append([p.grad.clone() for p in model.parameters()])
        return seen

    alone = _linear()
    for rank in range(world_size):
        go(alone, rank)
    wanted = [p.grad / world_size for p in alone.parameters()]
    for steps in pool(world_size).run(run):
        for grads in steps:
            _close(grads, wanted)


class Twice(nn.Module):
    def __init__(self, use_reentrant: bool, times: int = 2) -> None:
        super().__init__()
        self.layer, self.head = _linear(), _linear()
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layer, torch.tanh(x), use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_a_layer_checkpointed_twice_counts_twice(
    pool: Any, use_reentrant: bool, find_unused: bool
) -> None:
    """torch: silently wrong when re-entrant, the nested backward's end being taken for the end."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(_x(rank, 3, 4).requires_grad_()).square().mean()

    def run() -> list[list[Tensor]]:
        from pdt.ddp import DDP

        model = DDP(
            Twice(use_reentrant),
            bucket_cap_mb=0,
            first_bucket_mb=0,
            find_unused_parameters=find_unused,
        )
        seen = []
        for _ in range(3):
            model.zero_grad()
            loss(model, dist.get_rank()).backward()
            seen.append([p.grad.clone() for p in model.parameters()])
        return seen

    wanted = _mean_of_ranks(loss, lambda: Twice(False), 2)
    for steps in pool(2).run(run):
        for grads in steps:
            _close(grads, wanted)


@pytest.mark.slow
def test_a_layer_that_is_checkpointed_more_often_than_before_is_named() -> None:
    def run() -> None:
        from pdt.ddp import DDP

        model = DDP(Twice(True), bucket_cap_mb=0, first_bucket_mb=0)
        for times in (1, 3):
            model.module.times = times
            model.zero_grad()
            model(_x(0, 3, 4).requires_grad_()).sum().backward()

    with Ranks(2) as ranks, pytest.raises(RankError, match=r"'layer\.(weight|bias)' got a gradi"):
        ranks.run(run)


def test_buffers_may_change_between_forwards_of_one_backward(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = _linear()
                self.register_buffer("factor", torch.full((4,), 2.0, dtype=torch.float64))

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) * self.factor

        model = DDP(Scaled())
        _two_forwards(model, dist.get_rank())
        normed = DDP(nn.Sequential(_linear(), nn.BatchNorm1d(4).double()))
        _two_forwards(normed, dist.get_rank())
        return [p.grad for p in model.parameters()]

    first, second = pool(2).run(run)
    _close(first, second)


# Parameters without a gradient


class Branches(nn.Module):
    """`a` is always used, `b` never, `c` on rank 0 alone."""

    def __init__(self, c_on: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(1, 1, bias=False).double() for _ in "abc")
        self.c_on = c_on
        for layer in (self.a, self.b, self.c):
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + self.c(x) if dist.get_rank() in self.c_on else y


def test_a_parameter_unused_everywhere_is_left_alone(pool: Any) -> None:
    def run() -> list[Any]:
        from pdt.ddp import DDP

        model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0, first_bucket_mb=0)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        x = torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            grads = [layer.weight.grad for layer in (model.module.a, model.module.b)]
            seen.append((grads[0].item(), grads[1], model.module.c.weight.grad.item()))
            optimizer.step()
        return [*seen, model.module.b.weight.item()]

    for seen in pool(2).run(run):
        assert seen == [(1.5, None, 0.5)] * 3 + [0.5]


def test_a_gradient_of_earlier_is_left_alone_where_no_rank_has_a_new_one(pool: Any) -> None:
    def run() -> list[float]:
        from pdt.ddp import DDP

        model = DDP(Branches((0, 1, 2)), find_unused_parameters=True)
        x = torch.full((1, 1), 0.1 + dist.get_rank(), dtype=torch.float64)
        model(x).sum().backward()
        model.module.c_on = ()
        first = model.module.c.weight.grad.item()
        for _ in range(2):
            model(x).sum().backward()  # without zero_grad
        return [first, model.module.c.weight.grad.item(), model.module.a.weight.grad.item()]

    for first, later, summed in pool(3).run(run):
        assert first == later  # to the bit: not averaged again
        assert summed == pytest.approx(3 * first)


def test_unused_without_the_flag_is_an_error_in_that_backward_on_every_rank(pool: Any) -> None:
    """torch: the first backward returns with each rank's own gradients."""

    def run(c_on: tuple[int, ...]) -> tuple[str, list[str], list[Any]]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        model = DDP(Branches(c_on))
        x = torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)
        said = ""
        with meter() as m:
            try:
                model(x).sum().backward()
            except RuntimeError as error:
                said = str(error)
        return said, m.ops(), [p.grad for p in model.parameters()]

    (first, ops, grads), (second, *_) = pool(2).run(run, (0,))
    assert ops == ["all_gather"]  # no gradient was sent
    assert grads == [None] * 3
    assert first == second
    assert "rank 0: 'b.weight'; rank 1: 'b.weight', 'c.weight'" in first


def test_unused_in_a_later_step_is_named_and_leaves_the_others_right(pool: Any) -> None:
    def run() -> Any:
        from pdt.ddp import DDP

        module = Branches((0, 1))
        module.b.requires_grad_(False)
        model = DDP(module, bucket_cap_mb=0, first_bucket_mb=0)
        x = torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)
        model(x).sum().backward()
        module.c_on = (0,)
        model.zero_grad()
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            return str(error)
        return [module.a.weight.grad.item(), module.c.weight.grad.item()]

    grads, message = pool(2).run(run)
    assert grads == [1.5, 0.5]
    assert "rank 1: 'c.weight'" in message


def test_an_output_that_is_not_in_the_loss_hangs_nobody(pool: Any) -> None:
    def run() -> list[Any]:
        from pdt.ddp import DDP

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return self.one(x), self.two(x)

        model = DDP(Heads(), find_unused_parameters=True, bucket_cap_mb=0, first_bucket_mb=0)
        for _ in range(2):
            model.zero_grad()
            one, _ = model(torch.ones(1, 1) + dist.get_rank())
            one.sum().backward()
        return [model.module.one.weight.grad.item(), model.module.two.weight.grad]

    assert pool(2).run(run) == [[1.5, None]] * 2


def test_unused_parameters_do_not_hold_back_the_others(pool: Any) -> None:
    """A bucket that this backward's graph does not reach counts as full when backward begins."""

    def run() -> list[int]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        module = Branches((0, 1))
        module.b.requires_grad_(False)
        model = DDP(module, find_unused_parameters=True, bucket_cap_mb=0, first_bucket_mb=0)
        x = torch.ones(1, 1, dtype=torch.float64)
        model(x).sum().backward()
        first = module.c if model.buckets[0].params == (1,) else module.a
        kept = module.a if first is module.c else module.c
        module.forward = lambda x: kept(x)
        sent = []
        with meter() as m:
            y = model(x)
            y.register_hook(lambda grad: sent.append(len(m)))  # runs behind DDP's own
            y.sum().backward()
        return [*sent, len(m)]

    assert pool(2).run(run) == [[1, 3]] * 2


def test_used_only_without_sync_is_reduced_at_the_synchronised_backward(pool: Any) -> None:
    def run(find_unused: bool) -> list[list[float]]:
        from pdt.ddp import DDP

        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = (nn.Linear(1, 1, bias=False) for _ in "ab")

            def forward(self, x: Tensor, name: str) -> Tensor:
                return getattr(self, name)(x)

        model = DDP(Either(), find_unused_parameters=find_unused)
        x = torch.full((1, 1), 1.0 + dist.get_rank())
        seen = []
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                model(x, "a").backward()
            model(x, "b").backward()
            seen.append([p.grad.item() for p in model.parameters()])
        return seen

    for flag in (True, False):
        assert pool(2).run(run, flag) == [[[1.5, 1.5]] * 3] * 2


# Accumulation; parameters that change


def test_no_sync_is_decided_where_the_forward_stands(pool: Any) -> None:
    def run() -> list[tuple[int, float]]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + dist.get_rank())
        model(x).backward()
        seen = []
        for inside in ("backward", "forward"):
            model.zero_grad()
            with meter() as m:
                if inside == "backward":
                    y = model(x)
                    with model.no_sync():
                        y.backward()
                else:
                    with model.no_sync():
                        y = model(x)
                    y.backward()
            seen.append((len(m), model.module.weight.grad.item()))
        return seen

    first, second = pool(2).run(run)
    assert first == [(1, 1.5), (0, 1.0)]
    assert second == [(1, 1.5), (0, 2.0)]


@pytest.mark.parametrize("first_synced", [True, False])
def test_accumulation_equals_one_process_in_every_step(pool: Any, first_synced: bool) -> None:
    def run() -> list[list[Tensor]]:
        from pdt.ddp import DDP

        model, rank = DDP(_linear(), bucket_cap_mb=0, first_bucket_mb=0), dist.get_rank()
        if first_synced:
            model(_x(rank, 2, 4)).mean().backward()
        seen = []
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                for micro in range(2):
                    model(_x(100 * step + 10 * micro + rank, 2, 4)).square().mean().backward()
            model(_x(100 * step + 20 + rank, 2, 4)).square().mean().backward()
            seen.append([p.grad.clone() for p in model.parameters()])
        return seen

    for steps in pool(2).run(run):
        for step, grads in enumerate(steps):
            alone = _linear()
            for number in (0, 1, 10, 11, 20, 21):
                (alone(_x(100 * step + number, 2, 4)).square().mean() / 2).backward()
            _close(grads, [p.grad for p in alone.parameters()])


def test_accumulating_in_bf16_saturates_and_in_fp32_does_not(pool: Any) -> None:
    def run(grad_dtype: torch.dtype | None) -> list[Any]:
        from pdt.ddp import DDP

        layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model = DDP(layer, grad_dtype=grad_dtype)
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        seen = []
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                for _ in range(599):
                    model(x).backward()
            model(x).backward()
            seen.append(layer.weight.grad.item())
        dtypes = [layer.weight.grad.dtype]
        del model
        layer.zero_grad()
        layer(x).backward()
        return [*seen, *dtypes, layer.weight.grad.dtype]

    low, high = torch.bfloat16, torch.float32
    assert pool(2).run(run, high) == [[600.0, 600.0, high, low]] * 2  # at last, as before wrapping
    assert pool(2).run(run, None) == [[256.0, 256.0, low, low]] * 2


def test_fp16_gradients_are_divided_before_they_are_added(pool: Any) -> None:
    def run() -> float:
        from pdt.ddp import DDP

        layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
        model = DDP(layer)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 1), 6e4, dtype=torch.float16)).backward()
        return layer.weight.grad.item()

    assert pool(2).run(run) == [pytest.approx(6e4, rel=1e-3)] * 2


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "replace"])
def test_frozen_unfrozen_and_replaced_parameters_are_followed(pool: Any, change: str) -> None:
    """torch: a frozen one leaves its bucket unsynchronised, an unfrozen one stays this rank's."""

    def run() -> tuple[list[Tensor | None], list[int]]:
        from pdt.ddp import DDP

        module = nn.Sequential(_linear(), _linear())
        weight, rank = module[0].weight, dist.get_rank()
        weight.requires_grad_(change != "unfreeze")
        model = DDP(module, bucket_cap_mb=0, first_bucket_mb=0)
        for step in range(3):
            model.zero_grad()
            model(_x(rank, 3, 4)).square().mean().backward()
            if step == 0 and change != "replace":
                weight.requires_grad_(change == "unfreeze")
            elif step == 0:
                module[0].weight = nn.Parameter(weight.detach().clone())
        return [p.grad for p in module.parameters()], [len(b.params) for b in model.buckets]

    alone = nn.Sequential(_linear(), _linear())
    alone[0].weight.requires_grad_(change != "freeze")
    for rank in range(2):
        (alone(_x(rank, 3, 4)).square().mean() / 2).backward()
    for grads, plan in pool(2).run(run):
        assert len(plan) == (3 if change == "freeze" else 4)
        assert (grads[0] is None) == (change == "freeze")
        _close(
            [g for g in grads if g is not None],
            [p.grad for p in alone.parameters() if p.grad is not None],
        )


# Models that differ


def _more(rank: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(2, 2)] * 1, *([nn.Linear(2, 2)] if rank else []))


DIFFERENT = {
    "number": (_more, "rank 0 holds nothing more; rank 1 holds parameter 1.weight"),
    "shape": (lambda rank: nn.Linear(2, 2 + rank), r"weight \(2, 2\).*weight \(3, 2\)"),
    "layout": (
        lambda rank: nn.Conv2d(3, 4, 2).to(
            memory_format=torch.channels_last if rank else torch.contiguous_format
        ),
        r"strides \(12, 4, 2, 1\).*strides \(12, 1, 6, 3\)",
    ),
    "float64": (
        lambda rank: nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32),
        "float32.*float64",
    ),
    "bfloat16": (
        lambda rank: nn.Linear(2, 2, dtype=torch.bfloat16 if rank else torch.float16),
        "float16.*bfloat16",
    ),
    "frozen": (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), r"requires_grad; rank 1"),
    "name": (lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(2, 2)}), r"a\.weight.*b\.weight"),
    "buffer": (lambda rank: nn.BatchNorm1d(2, affine=True, track_running_stats=rank == 0), "buff"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_models_that_differ_are_refused_alike_on_every_rank(pool: Any, kind: str) -> None:
    """torch: a hang for fp64, garbage for bf16, one rank without a reason for shapes."""
    make, words = DIFFERENT[kind]

    def run() -> str:
        from pdt.ddp import DDP

        try:
            DDP(make(dist.get_rank()))
        except ValueError as error:
            return str(error)
        return "no error"

    first, second = pool(2).run(run)
    assert first == second
    assert re.search(words, first), first


def test_a_module_with_nothing_to_train_is_refused(pool: Any) -> None:
    def run() -> list[str]:
        from pdt.ddp import DDP

        said = []
        for module in (nn.Linear(2, 2).requires_grad_(False), nn.LazyLinear(2)):
            try:
                DDP(module)
            except ValueError as error:
                said.append(str(error))
        return said

    frozen, lazy = pool(2).run(run)[1]
    assert "no parameter that requires a gradient" in frozen
    assert "'weight' has no shape yet" in lazy


# Gradients by other ways than backward


def test_autograd_grad_is_refused_with_the_way_out(pool: Any) -> None:
    """torch: each rank's own gradients, silently."""

    def run() -> tuple[str, list[float]]:
        from pdt.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + dist.get_rank())
        try:
            torch.autograd.grad(model(x), list(model.parameters()))
        except RuntimeError as error:
            refused = str(error)
        local = torch.autograd.grad(model.module(x), list(model.module.parameters()))
        model(x).backward()
        return refused, [local[0].item(), model.module.weight.grad.item()]

    for rank, (refused, values) in enumerate(pool(2).run(run)):
        assert "'weight'" in refused
        assert "ddp.module" in refused
        assert values == [1.0 + rank, 1.5]


def test_create_graph_is_refused_and_a_gradient_penalty_works(pool: Any) -> None:
    def run() -> tuple[str, list[Tensor]]:
        from pdt.ddp import DDP

        model = DDP(_linear())
        try:
            model(_x(0, 3, 4)).square().sum().backward(create_graph=True)
        except RuntimeError as error:
            refused = str(error)
        model.zero_grad()
        _penalty(model, dist.get_rank()).backward()
        return refused, [model.module.weight.grad]

    wanted = _mean_of_ranks(_penalty, _linear, 2)
    for refused, grads in pool(2).run(run):
        assert "create_graph" in refused
        _close(grads, wanted[:1])


def _penalty(model: nn.Module, rank: int) -> Tensor:
    x = _x(rank, 3, 4).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().mean()


# Kinds of parameters


def test_sparse_gradients_are_averaged(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        model = DDP(nn.Embedding(4, 3, padding_idx=0, sparse=True))
        indices = torch.tensor([[0, 0], [1, 2]][dist.get_rank()])
        seen = []
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                model(indices).sum().backward()
            model(indices).sum().backward()
            seen.append(model.module.weight.grad.to_dense().clone())
        return seen

    wanted = torch.tensor([0.0, 1.0, 1.0, 0.0])[:, None].expand(4, 3)
    for steps in pool(2).run(run):
        _close(steps, [wanted, wanted])


def test_complex_parameters_keep_both_parts(pool: Any) -> None:
    def run() -> list[complex]:
        from pdt.ddp import DDP

        class Rotation(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.full((2,), 1 + 1j, dtype=torch.complex64))

            def forward(self, x: Tensor) -> Tensor:
                return (self.w * x).abs().square()

        model = DDP(Rotation())
        x = torch.tensor([1 + 2j, 3 - 1j]) * (dist.get_rank() + 1)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        return model.module.w.grad.tolist()

    for grads in pool(2).run(run):
        assert grads == pytest.approx([25 + 25j, 50 + 50j])


# Exceptions


def test_an_exception_in_forward_or_backward_leaves_the_next_step_right(pool: Any) -> None:
    def run() -> tuple[list[str], list[Tensor]]:
        from pdt.ddp import DDP

        class Fragile(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second, self.fails = _linear(), _linear(), ""

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                if self.fails == "forward":
                    raise KeyError("forward")
                if self.fails == "backward":
                    x.register_hook(self._fail)
                return self.second(x)

            def _fail(self, grad: Tensor) -> None:
                raise KeyError("backward")

        model = DDP(Fragile(), bucket_cap_mb=0, first_bucket_mb=0)
        caught = []
        for fails in ("", "forward", "", "backward", ""):
            model.module.fails = fails
            model.zero_grad()
            try:
                model(_x(dist.get_rank(), 3, 4)).square().mean().backward()
            except KeyError as error:
                caught += error.args
        return caught, [p.grad for p in model.parameters()]

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(_x(rank, 3, 4)).square().mean()

    wanted = _mean_of_ranks(loss, lambda: nn.Sequential(_linear(), _linear()), 2)
    for caught, grads in pool(2).run(run):
        assert caught == ["forward", "backward"]
        _close(grads, wanted)


def test_outputs_in_containers_and_dataclasses_are_found(pool: Any) -> None:
    def run() -> list[list[Tensor]]:
        from dataclasses import dataclass

        from pdt.ddp import DDP

        @dataclass
        class Output:
            logits: Tensor
            more: dict[str, list[Tensor]]

        class Boxed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.twice = Twice(use_reentrant=True)

            def forward(self, x: Tensor) -> Output:
                y = self.twice(x)
                return Output(y[:1], {"rest": [y[1:], torch.ones(1)]})

        model = DDP(Boxed(), bucket_cap_mb=0, first_bucket_mb=0)
        seen = []
        for _ in range(2):
            model.zero_grad()
            output = model(_x(dist.get_rank(), 3, 4).requires_grad_())
            torch.cat([output.logits, *output.more["rest"][:1]]).square().mean().backward()
            seen.append([p.grad.clone() for p in model.parameters()])
        return seen

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(_x(rank, 3, 4).requires_grad_()).square().mean()

    wanted = _mean_of_ranks(loss, lambda: Twice(False), 2)
    for steps in pool(2).run(run):
        for grads in steps:
            _close(grads, wanted)
