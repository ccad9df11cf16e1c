"""What users of sharded optimizers have run into: Zero1 and Zero2 are right there, or say why not.

Each retells public reports of users of PyTorch, DeepSpeed and others. Where torch 2.13 is silently
wrong, it is said. Worlds of three ranks and more are left to `make test` (see conftest.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STAGES = pytest.mark.parametrize("stage", [1, 2])
SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
SAMPLES = 12  # of a batch over all ranks: 1, 2, 3 and 4 divide it


def _make(stage: int, params: Any, cls: Any = torch.optim.AdamW, **settings: Any) -> Any:
    from pdt.zero import Zero1, Zero2

    return (Zero1, Zero2)[stage - 1](params, cls, **settings)


def _x(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _mine(batch: Tensor) -> Tensor:
    return batch[dist.get_rank() :: dist.get_world_size()]


def _everybodys(batch: Tensor) -> Tensor:
    return batch


def _params(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def _close(found: list[Tensor], expected: list[Tensor], atol: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def _mlp(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


Train = Callable[[Any, Callable[[Tensor], Tensor]], Any]


def _check(
    pool: Any, world_size: int, stage: int, train: Train, atol: float = 1e-12, **kwargs: Any
) -> None:
    """`train(make, part)` returns tensors: the same with a sharded optimizer on each rank's part of
    the samples as with the plain one on all of them. `make(params, cls, ...)`: the optimizer."""

    def run() -> Any:
        return train(lambda *args, **settings: _make(stage, *args, **settings, **kwargs), _mine)

    expected = train(lambda params, cls, **settings: cls(params, **settings), _everybodys)
    for found in pool(world_size).run(run):
        _close(found, expected, atol)


# Ranks without elements, frozen parameters


@STAGES
@SIZES
def test_ranks_that_own_nothing_take_part(pool: Any, world_size: int, stage: int) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(3, 1, bias=False).double()
        frozen = nn.Linear(3, 1).double().requires_grad_(False)
        groups = [{"params": module.parameters()}, {"params": frozen.parameters(), "lr": 9.0}]
        optimizer = make(groups, torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            x = part(_x(step, SAMPLES, 3))
            (module(x) + frozen(x)).square().mean().backward()
            optimizer.step()
            seen += _params(module)
        assert set(optimizer.state_dict()["state"]) == {0}
        return seen

    _check(pool, world_size, stage, train)


@STAGES
@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2, 4)])
def test_frozen_layers_have_no_state_and_no_gradient(
    pool: Any, stage: int, frozen: tuple[int, ...]
) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        for index in frozen:
            model[index].requires_grad_(False)
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            x = part(_x(step, SAMPLES, 4)).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            seen += _params(model)
        named = list(model.parameters())
        assert all(named[number].requires_grad for number in optimizer.state_dict()["state"])
        return seen

    _check(pool, 2, stage, train)


@STAGES
@SIZES
def test_layers_may_be_unfrozen_and_frozen_later(pool: Any, world_size: int, stage: int) -> None:
    """DDP of torch 2.13: what is unfrozen stays each rank's own."""

    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double().requires_grad_(False)
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        seen = []
        for step, trained in enumerate([(), (4,), (2, 4), (0, 2, 4), (0,), (0,), (0, 2, 4)]):
            for index in (0, 2, 4):
                model[index].requires_grad_(index in trained)
            optimizer.zero_grad()
            x = part(_x(step, SAMPLES, 4)).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, world_size, stage, train)


@STAGES
def test_what_one_rank_alone_unfreezes_is_named_on_all(pool: Any, stage: int) -> None:
    def run() -> str:
        model = _mlp().requires_grad_(False)
        model[4].requires_grad_(True)
        optimizer = _make(stage, model.named_parameters())
        model[0].weight.requires_grad_(dist.get_rank() == 1)
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return ""

    first, second = pool(2).run(run)
    assert first == second
    assert "rank 0 holds 0.weight, (5, 4) float32, strides (4, 1), frozen; rank 1" in first


# Saving and loading


def _two_groups() -> tuple[nn.ParameterList, list[dict[str, Any]]]:
    """Interleaved with regard to the module, of sizes that nothing divides."""
    torch.manual_seed(1)
    params = nn.ParameterList([torch.randn(n, dtype=torch.float64) for n in (5, 3, 7, 1)])
    decay, others = [params[0], params[2]], [params[3], params[1]]
    return params, [
        {"params": decay, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]


def _saving(
    make: Any, part: Any, saved: Any, first: int, last: int
) -> tuple[list[Tensor], dict[str, Any]]:
    params, groups = _two_groups()
    optimizer = make(groups, torch.optim.AdamW, lr=0.05)
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(params, saved[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch goes on in what it was given
    for step in range(first, last):
        optimizer.zero_grad()
        x = part(_x(step, SAMPLES, 16))
        flat = torch.cat([params[i] for i in range(4 if step != 1 else 3)])
        (x[:, : flat.numel()] @ flat).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.state_dict()


def _same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert found["state"][number][key].shape == value.shape
            torch.testing.assert_close(found["state"][number][key], value, rtol=0, atol=1e-12)


def _plain(params: Any, cls: Any, **settings: Any) -> Any:
    return cls(params, **settings)


def _move_between(pool: Any, stage: int, sizes: tuple[int, ...]) -> None:
    """0 stands for the plain optimizer in one process."""

    def train(world_size: int, saved: Any, first: int, last: int) -> Any:
        if world_size == 0:
            return _saving(_plain, _everybodys, saved, first, last)

        def run() -> Any:
            return _saving(lambda *a, **k: _make(stage, *a, **k), _mine, saved, first, last)

        everybody = pool(world_size).run(run)
        for params, state in everybody[1:]:
            _close(params, everybody[0][0], 0)
            _same_state(state, everybody[0][1])
        return everybody[0]

    whole = train(0, None, 0, 5)
    for source in sizes:
        saved = train(source, None, 0, 3)
        for target in sizes:
            params, state = train(target, saved, 3, 5)
            _close(params, whole[0])
            _same_state(state, whole[1])


@STAGES
def test_states_move_between_the_plain_optimizer_and_two_ranks(pool: Any, stage: int) -> None:
    _move_between(pool, stage, (0, 2))


@pytest.mark.slow
@STAGES
def test_states_move_between_all_world_sizes(pool: Any, stage: int) -> None:
    _move_between(pool, stage, (0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.Adagrad, {"lr": 0.1}),  # has its states from the beginning
        (torch.optim.SGD, {"lr": 0.1}),  # has none
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.Rprop, {"lr": 0.01}),
        (torch.optim.ASGD, {"lr": 0.01}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_any_elementwise_optimizer_saves_and_goes_on(pool: Any, cls: Any, settings: Any) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        model[2].requires_grad_(False)
        optimizer = make(model.parameters(), cls, **settings)
        seen = []
        for step in range(4):
            if step == 2:
                state = optimizer.state_dict()
                model[2].requires_grad_(True)
                optimizer = make(model.parameters(), cls, **settings)
                if cls is torch.optim.Adagrad and isinstance(optimizer, cls):
                    fresh = optimizer.state_dict()["state"]
                    state["state"] = fresh | state["state"]  # torch's own wants all
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model(part(_x(step, SAMPLES, 4))).square().mean().backward()
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, 2, 1, train, atol=1e-11)


def test_other_groups_or_shapes_are_not_loaded(pool: Any) -> None:
    def run() -> list[str]:
        def state(*shapes: tuple[int, ...]) -> dict[str, Any]:
            params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
            optimizer = torch.optim.AdamW(params)
            sum(p.sum() for p in params).backward()
            optimizer.step()
            return optimizer.state_dict()

        optimizer = _make(1, [("w", nn.Parameter(torch.ones(2, 3)))])
        said = []
        for wrong in (state((2, 3), (1,)), state((3, 2))):
            try:
                optimizer.load_state_dict(wrong)
            except ValueError as error:
                said.append(str(error))
        return said

    for groups, shape in pool(2).run(run):
        assert "the saved groups have [2] parameters, this optimizer's [1]" in groups
        assert "'exp_avg' of w was saved in the shape (3, 2), the parameter has (2, 3)" in shape


def test_what_was_loaded_is_no_longer_tied_to_where_it_came_from(pool: Any) -> None:
    def run() -> bool:
        state = None
        for _ in range(2):
            param = nn.Parameter(torch.ones(5))
            optimizer = _make(1, [param], lr=torch.tensor(0.1))
            if state is not None:
                optimizer.load_state_dict(state)
                kept = copy.deepcopy(state)
            param.grad = torch.ones(5)
            optimizer.step()
            if state is not None:
                optimizer.param_groups[0]["lr"].mul_(0)
                same = [torch.equal(state["state"][0][k], v) for k, v in kept["state"][0].items()]
                return all(same) and state["param_groups"][0]["lr"].item() != 0
            state = optimizer.state_dict()
        return False

    assert pool(2).run(run) == [True, True]


def test_a_sharded_optimizer_is_not_copied_but_refused(pool: Any) -> None:
    def run() -> str:
        try:
            copy.deepcopy(_make(2, [nn.Parameter(torch.ones(3))]))
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("Zero2 cannot be copied or pickled" in said for said in pool(2).run(run))


# Accumulation, and other graphs than one forward and one backward


@STAGES
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("synced", ["every", "last", "first", "none"])
def test_accumulation_needs_no_word(pool: Any, world_size: int, stage: int, synced: str) -> None:
    """Four micro-batches, three steps; with and without `no_sync`, wherever it stands."""
    from contextlib import nullcontext

    micro = 4

    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            for i in range(micro):
                syncs = {"every": True, "last": i == 3, "first": i == 0, "none": False}[synced]
                quiet = hasattr(optimizer, "no_sync") and not syncs
                with optimizer.no_sync() if quiet else nullcontext():
                    x = part(_x(10 * step + i, SAMPLES, 4))
                    (model(x).square().mean() / micro).backward()
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, world_size, stage, train, bucket_cap_mb=0.0001)


def _two_backwards(m: nn.Module, x: Tensor) -> None:  # DDP of torch 2.13: the second is local
    a, b = m(x), m(x + 1)
    a.square().mean().backward()
    b.square().mean().backward()


def _retained(m: nn.Module, x: Tensor) -> None:  # DDP of torch 2.13: the second is local
    y = m(x).square().mean()
    y.backward(retain_graph=True)
    y.backward()


def _two_forwards(m: nn.Module, x: Tensor) -> None:
    (m(x).square().mean() + m(x + 1).square().mean()).backward()


def _create_graph(m: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m(x).square().mean().backward(create_graph=True)


def _penalty(m: nn.Module, x: Tensor) -> None:
    loss = m(x).square().mean()
    grads = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
    (loss + sum(g.mean() for g in grads)).backward()


@STAGES
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("go", [_two_backwards, _retained, _two_forwards, _create_graph, _penalty])
def test_every_backward_counts(pool: Any, world_size: int, stage: int, go: Any) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            go(model, part(_x(step, SAMPLES, 4)))
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, world_size, stage, train, bucket_cap_mb=0)


class Checkpointed(nn.Module):
    """One layer twice, another once, between layers outside of checkpoints."""

    def __init__(self, use_reentrant: bool, with_head: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.foot, self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 4) if with_head else nn.Identity()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.foot(x)
        for layer in (self.layer, self.other, self.layer):
            x = checkpoint(layer, torch.tanh(x), use_reentrant=self.use_reentrant)
        return self.head(x)


@STAGES
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_checkpointed_layers_count_as_often_as_they_are_used(
    pool: Any, stage: int, use_reentrant: bool, with_head: bool
) -> None:
    """DDP of torch 2.13: silently wrong when re-entrant, a nested end being taken for the end."""

    def train(make: Any, part: Any) -> list[Tensor]:
        model = Checkpointed(use_reentrant, with_head).double()
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            model(part(_x(step, SAMPLES, 4))).square().mean().backward()
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, 2, stage, train, bucket_cap_mb=0)


@STAGES
def test_a_closure_is_run_once_before_the_ranks_agree(pool: Any, stage: int) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            x = part(_x(step, SAMPLES, 4))

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure).dim() == 0
            seen += _params(model)
        return seen

    _check(pool, 2, stage, train)


@STAGES
def test_an_exception_in_a_backward_leaves_nothing_behind(pool: Any, stage: int) -> None:
    def run(fails: bool) -> list[Tensor]:
        model = _mlp().double()
        optimizer = _make(stage, model.parameters(), lr=0.1, bucket_cap_mb=0)
        said = []
        for step in range(4):
            optimizer.zero_grad()
            if fails and step in (0, 2):
                hidden = model[:3](_mine(_x(step, SAMPLES, 4)))
                hidden.register_hook(_raise)
                with pytest.raises(ArithmeticError):
                    model[3:](hidden).square().mean().backward()
                if stage == 2:
                    with pytest.raises(RuntimeError, match="a backward has not ended"):
                        optimizer.step()
                said.append(step)
                optimizer.zero_grad()
            model(_mine(_x(step, SAMPLES, 4))).square().mean().backward()
            optimizer.step()
        return _params(model)

    expected = pool(2).run(run, False)
    for found, wanted in zip(pool(2).run(run, True), expected, strict=True):
        _close(found, wanted, 0)


def _raise(_grad: Tensor) -> None:
    raise ArithmeticError


# Who has a gradient


class Branches(nn.Module):
    """`a` is always used, `b` never, `c` on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(1, 1, bias=False).double() for _ in "abc")
        for layer in (self.a, self.b, self.c):
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + self.c(x) if dist.get_rank() == 0 else y


@STAGES
@pytest.mark.parametrize("cap", [0.0, 25.0])
def test_what_no_rank_uses_is_left_alone_and_what_one_uses_counts_in_part(
    pool: Any, stage: int, cap: float
) -> None:
    def run() -> list[float]:
        model = Branches()
        optimizer = _make(stage, model.parameters(), lr=0.1, weight_decay=0.1, bucket_cap_mb=cap)
        x = torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return [p.item() for p in model.parameters()]

    params = [nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) for _ in range(2)]
    plain = torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        params[0].grad, params[1].grad = params[0].new_tensor(1.5), params[1].new_tensor(0.5)
        plain.step()
    for a, b, c in pool(2).run(run):
        assert b == 0.5  # to the bit
        assert (a, c) == pytest.approx([p.item() for p in params], abs=1e-14)


@STAGES
def test_graphs_that_use_what_was_not_updated_stay_valid(pool: Any, stage: int) -> None:
    def run() -> float:
        first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = _make(stage, [first, second], torch.optim.SGD, lr=0.5)
        later = second.square().sum()
        first.square().sum().backward()
        optimizer.step()
        later.backward()
        optimizer.zero_grad()
        stale = first.square().sum()
        first.square().sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        optimizer.zero_grad()
        return second.sum().item()

    assert pool(2).run(run) == [3.0, 3.0]


@STAGES
@SIZES
def test_sparse_gradients_are_reduced_as_dense_ones(pool: Any, world_size: int, stage: int) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, padding_idx=0, sparse=True).double()
        optimizer = _make(stage, table.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            table(_indices(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
        return _params(table)

    torch.manual_seed(0)
    table = nn.Embedding(6, 3, padding_idx=0).double()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [table(_indices(rank, step)).square().sum() for rank in range(world_size)]
        (sum(losses) / world_size).backward()
        optimizer.step()
    for found in pool(world_size).run(run):
        _close(found, _params(table))


def _indices(rank: int, step: int) -> Tensor:
    """Rank 0 has padding alone."""
    return torch.tensor([0, 0]) if rank == 0 else torch.tensor([1 + step, 1 + rank, 1 + rank])


@STAGES
def test_complex_parameters_keep_their_imaginary_part(pool: Any, stage: int) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j, 0.5j], dtype=torch.complex128))
        optimizer = make([weight], torch.optim.AdamW, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (part(_x(step, SAMPLES, 3)) * weight).abs().square().mean().backward()
            optimizer.step()
        return [weight.detach().clone()]

    _check(pool, 2, stage, train)


# Low precision


@STAGES
def test_fp16_gradients_do_not_overflow_in_the_sum(pool: Any, stage: int) -> None:
    """gloo's own sum of 6e4 and 6e4 is infinite."""

    def run() -> list[float]:
        param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        optimizer = _make(stage, [param], torch.optim.SGD, master_dtype=torch.float32)
        (param * 6e4).sum().backward()
        optimizer.reduce_gradients()
        return optimizer.buckets[0].shard_grad.tolist()

    expected = torch.tensor(6e4, dtype=torch.float16).item()
    assert pool(2).run(run) == [[expected] * 2] * 2


@pytest.mark.slow
def test_three_hundred_bf16_gradients_of_one_are_three_hundred(pool: Any) -> None:
    """bf16 added to bf16 stays at 256, as DDP's `no_sync` of torch 2.13 does."""

    def run() -> list[float]:
        param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = _make(2, [param], torch.optim.SGD, master_dtype=torch.float32)
        for _ in range(300):
            param.sum().backward()
        return optimizer.buckets[0].shard_grad.tolist()

    assert pool(2).run(run) == [[300.0]] * 2


def _steps_of(make: Any, part: Any, dtype: torch.dtype) -> list[Tensor]:
    """Shapes without a common divisor, two groups, one added later, another rate each step."""
    torch.manual_seed(0)
    shapes = [(1,), (7,), (3, 5), (1025,), (4, 3)]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params[4].data = params[4].data.t()
    groups = [{"params": params[:2]}, {"params": params[2:3] + params[4:], "betas": (0.8, 0.9)}]
    optimizer = make(groups, torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    seen = []
    for step in range(5):
        if step == 3:
            optimizer.add_param_group({"params": [params[3]], "lr": 0.01})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.zero_grad()
        for i, param in enumerate(params):
            grads = torch.stack([_x(10 * step + i, *param.shape) + k % 2 for k in range(SAMPLES)])
            param.grad = part(grads).mean(0).to(dtype)
        optimizer.step()
        seen += [p.detach().clone() for p in params]
    return seen


@STAGES
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_odd_shapes_groups_and_rates_step_as_one(pool: Any, world_size: int, stage: int) -> None:
    _check(pool, world_size, stage, lambda m, p: _steps_of(m, p, torch.float64))


@STAGES
def test_bf16_with_a_master_copy_is_fp32_rounded_once(pool: Any, stage: int) -> None:
    def reference() -> list[Tensor]:
        torch.manual_seed(0)
        param = torch.randn(1025).bfloat16()
        master = nn.Parameter(param.float())
        optimizer = torch.optim.AdamW([master], lr=0.05, foreach=False)
        seen = []
        for step in range(5):
            grads = [_x(step, 1025).bfloat16(), (_x(step, 1025) * 2).bfloat16()]
            mean = ((grads[0].float() + grads[1].float()).bfloat16() / 2).float()
            master.grad = mean
            optimizer.step()
            seen.append(master.detach().bfloat16())
        return seen

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(1025).bfloat16())
        optimizer = _make(
            stage, [param], master_dtype=torch.float32, lr=0.05, foreach=False, bucket_cap_mb=0
        )
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            grad = (_x(step, 1025) * (1 + dist.get_rank())).bfloat16()
            (param * grad).sum().backward()
            optimizer.step()
            seen.append(param.detach().clone())
        return seen

    for found in pool(2).run(run):
        _close(found, reference(), 0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_master_copy_is_saved_and_follows_what_is_written_to_the_model(
    pool: Any, momentum: float
) -> None:
    def run() -> list[Tensor]:
        def fresh() -> tuple[nn.Parameter, Any]:
            param = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            settings = {"lr": 1e-3, "momentum": momentum, "master_dtype": torch.float32}
            return param, _make(1, [param], torch.optim.SGD, **settings)

        def steps(param: nn.Parameter, optimizer: Any, n: int) -> None:
            for _ in range(n):
                param.grad = torch.full_like(param, 0.5)
                optimizer.step()

        whole, optimizer = fresh()
        steps(whole, optimizer, 3)  # too little for bf16 to show
        state, value = optimizer.state_dict(), whole.detach().clone()
        steps(whole, optimizer, 6)
        again, optimizer = fresh()
        with torch.no_grad():
            again.copy_(value)
        optimizer.load_state_dict(state)
        steps(again, optimizer, 6)
        other, optimizer = fresh()
        other.data.fill_(4.0)  # as loading a model does
        steps(other, optimizer, 1)
        plain = torch.optim.SGD([nn.Parameter(value.clone())], lr=1e-3, momentum=momentum)
        plain.load_state_dict(state)
        return [whole.detach(), again.detach(), other.detach()]

    for whole, again, other in pool(2).run(run):
        assert torch.equal(whole, again)
        assert not torch.equal(whole, torch.ones_like(whole))
        assert torch.equal(other, torch.full_like(other, 4.0))


# Clipping


@STAGES
@SIZES
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_by_the_norm_of_the_whole_gradient(
    pool: Any, world_size: int, stage: int, norm_type: float
) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        torch.manual_seed(0)
        row = nn.Linear(4, 1, bias=False).double()
        model = nn.Sequential(_mlp().double(), nn.Linear(3, 4).double(), row)
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            (10 * model(part(_x(step, SAMPLES, 4))).square().mean()).backward()
            if hasattr(optimizer, "clip_grad_norm_"):
                norm = optimizer.clip_grad_norm_(0.5, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
            optimizer.step()
            seen += [norm, *_params(model)]
        return seen

    _check(pool, world_size, stage, train, bucket_cap_mb=0)


@STAGES
def test_one_rank_s_infinity_is_seen_by_all_before_anything_is_stepped(
    pool: Any, stage: int
) -> None:
    def run() -> list[Any]:
        model = nn.Linear(3, 1, bias=False)
        optimizer = _make(stage, model.parameters())
        before = model.weight.detach().clone()
        x = torch.full((1, 3), float("inf") if dist.get_rank() == 1 else 1.0)
        model(x).sum().backward()
        try:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            return [str(error), torch.equal(model.weight, before)]
        return []

    for said, kept in pool(2).run(run):
        assert "norm of order 2.0 is inf" in said
        assert kept


@STAGES
def test_accumulated_without_sync_and_clipped_is_stepped(pool: Any, stage: int) -> None:
    from contextlib import nullcontext

    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        optimizer.zero_grad()
        with optimizer.no_sync() if hasattr(optimizer, "no_sync") else nullcontext():
            model(part(_x(0, SAMPLES, 4))).square().mean().backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return _params(model)

    _check(pool, 2, stage, train)


def test_a_gradient_that_changes_after_clipping_is_named(pool: Any) -> None:
    def run() -> str:
        model = _mlp()
        optimizer = _make(1, model.named_parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("the gradient of 0.weight has changed since" in said for said in pool(2).run(run))


# Ties and duplicates


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


@STAGES
@pytest.mark.parametrize("twice", [False, True])
def test_a_tied_weight_is_one_and_stays_one(pool: Any, stage: int, twice: bool) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        model = Tied().double()
        params = [model.table.weight, model.head.weight] if twice else model.parameters()
        listed = params if part is _mine else model.parameters()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of duplicates
            optimizer = make(listed, torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            tokens = torch.arange(SAMPLES).remainder(5)
            model(part(tokens)).square().mean().mul(1 + step).backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            assert model.head.weight is model.table.weight
            seen += _params(model)
        return seen

    _check(pool, 2, stage, train)


@STAGES
def test_a_parameter_in_two_groups_is_refused_on_every_rank(pool: Any, stage: int) -> None:
    def run(only_on: int | None) -> str:
        model = Tied()
        both = [{"params": [model.table.weight]}, {"params": [model.head.weight]}]
        duplicate = only_on in (None, dist.get_rank())
        try:
            _make(stage, both if duplicate else both[:1])
        except ValueError as error:
            return str(error)
        return ""

    for only_on in (None, 1):
        first, second = pool(2).run(run, only_on)
        assert first == second
        assert "some parameters appear in more than one parameter group" in first


@STAGES
@pytest.mark.parametrize("frozen", [False, True])
def test_two_parameters_in_the_same_memory_are_refused(pool: Any, stage: int, frozen: bool) -> None:
    def run() -> str:
        memory = torch.zeros(10)
        first, second = nn.Parameter(memory[:6]), nn.Parameter(memory[5:])
        second.requires_grad_(not frozen)
        try:
            _make(stage, [("w", first), ("v", second)])
        except ValueError as error:
            return str(error)
        return ""

    assert all("w and v are two parameters in the same memory" in s for s in pool(2).run(run))


# What does not fit together


def _differing(what: str, rank: int) -> tuple[list[Any], dict[str, Any]]:
    """What this rank passes to the optimizer: rank 1 differs in `what`."""
    odd = rank == 1
    dtype = torch.float64 if what == "dtype" and odd else torch.float32
    w = torch.zeros(3, 2 + (what == "shape" and odd), dtype=dtype)
    w = nn.Parameter(w.t() if what == "strides" and odd else w)
    v = nn.Parameter(torch.zeros(4), requires_grad=not (what == "frozen" and odd))
    groups = [{"params": [w]}, {"params": [v], "lr": 0.3 if what == "rate" and odd else 0.1}]
    if what == "groups" and odd:
        groups = [{"params": [w, v], "lr": 0.1}]
    if what == "number" and odd:
        groups.append({"params": [nn.Parameter(torch.zeros(1))]})
    cap = 1.0 if what == "cap" and odd else 25.0
    return groups, {"bucket_cap_mb": cap}


@STAGES
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dtype", "float64"),
        ("shape", "(3, 3)"),
        ("strides", "strides (1, 2)"),
        ("frozen", "frozen"),
        ("rate", "'lr': 0.3"),
        ("groups", "rank 1 holds group 0 with {'lr': 0.1"),
        ("number", "rank 1 holds group 2"),
        ("cap", "bucket_cap_mb=1.0"),
    ],
)
def test_ranks_that_differ_raise_the_same_error(
    pool: Any, stage: int, what: str, said: str
) -> None:
    """DDP of torch 2.13: with other dtypes it hangs, or takes rank 0's bits for other numbers."""

    def run() -> str:
        groups, arguments = _differing(what, dist.get_rank())
        try:
            _make(stage, groups, **arguments)
        except ValueError as error:
            return str(error)
        return ""

    first, second = pool(2).run(run)
    assert first == second
    assert said in first


def test_a_group_that_differs_is_not_added(pool: Any) -> None:
    def run() -> tuple[str, int, float]:
        param = nn.Parameter(torch.ones(3))
        optimizer = _make(1, [param], torch.optim.SGD, lr=0.5)
        said = ""
        try:
            other = nn.Parameter(torch.ones(2 + dist.get_rank()))
            optimizer.add_param_group({"params": [other]})
        except ValueError as error:
            said = str(error)
        param.sum().backward()
        optimizer.step()
        return said, len(optimizer.param_groups), param.sum().item()

    (first, *rest), (second, *others) = pool(2).run(run)
    assert first == second
    assert "rank 0 holds parameter 0 of group 1, (2,)" in first
    assert rest == others == [1, 1.5]


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam", "Muon"])
def test_optimizers_that_need_a_parameter_as_a_whole_are_refused(pool: Any, name: str) -> None:
    def run() -> str:
        class Mine(getattr(torch.optim, name)):
            pass

        try:
            _make(1, [nn.Parameter(torch.ones(2, 2))], Mine)
        except ValueError as error:
            return str(error)
        return ""

    if hasattr(torch.optim, name):
        assert all("Mine looks at a parameter as a whole" in said for said in pool(2).run(run))


def test_zero2_refuses_a_model_whose_gradients_are_averaged_already(pool: Any) -> None:
    def run() -> str:
        from pdt.ddp import DDP

        model = DDP(_mlp())
        try:
            _make(2, model.module.named_parameters())
        except ValueError as error:
            return str(error)
        return ""

    for said in pool(2).run(run):
        assert "is averaged already, by a Reducer of pdt.ddp" in said
        assert ".weight'" in said or ".bias'" in said


@pytest.mark.parametrize("as_views", [False, True])
def test_zero2_inside_torch_s_ddp_is_an_error_in_the_first_step(pool: Any, as_views: bool) -> None:
    def run() -> tuple[str, bool]:
        from torch.nn.parallel import DistributedDataParallel

        model = _mlp()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        optimizer = _make(2, model.named_parameters())
        before = _params(model)
        wrapped(_mine(_x(0, SAMPLES, 4)).float()).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            same = all(map(torch.equal, _params(model), before))
            return str(error), same
        return "", False

    for said, same in pool(2).run(run):
        assert "by a DistributedDataParallel around the model?" in said
        assert same


def test_zero1_inside_ddp_is_right_at_twice_the_traffic(pool: Any) -> None:
    def train(make: Any, part: Any) -> list[Tensor]:
        from pdt.ddp import DDP

        model = _mlp().double()
        wrapped = DDP(model) if part is _mine else model
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            wrapped(part(_x(step, SAMPLES, 4))).square().mean().backward()
            optimizer.step()
        return _params(model)

    _check(pool, 2, 1, train)


@STAGES
def test_parameters_whose_memory_is_replaced_are_named(pool: Any, stage: int) -> None:
    """torch's FSDP2: an optimizer made too early silently changes nothing."""

    def run() -> list[str]:
        said = []
        for replace in (lambda m: m.double(), lambda m: _make(1, m.parameters())):
            model = _mlp()
            optimizer = _make(stage, model.named_parameters())
            kept = replace(model)
            model(torch.ones(2, 4).to(model[0].weight.dtype)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                said.append(str(error))
            del kept
        return said

    for said in pool(2).run(run):
        assert len(said) == 2
        assert all("the memory of" in text and "make the optimizer last" in text for text in said)


def test_a_model_s_zero_grad_does_not_reach_zero2_and_that_is_said(pool: Any) -> None:
    def run() -> tuple[int, int]:
        counts = []
        for forgets in (True, False):
            model = _mlp()
            optimizer = _make(2, model.parameters())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    (model if forgets else optimizer).zero_grad()
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
            counts.append(sum("adds to gradients that a step" in str(w.message) for w in caught))
        return counts[0], counts[1]

    assert pool(2).run(run) == [(1, 0)] * 2


@STAGES
def test_zeroed_gradients_are_gradients(pool: Any, stage: int) -> None:
    """`zero_grad(set_to_none=False)`: a step then is one with zeros, as in torch."""

    def train(make: Any, part: Any) -> list[Tensor]:
        model = _mlp().double()
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            if step != 1:
                model(part(_x(step, SAMPLES, 4))).square().mean().backward()
            optimizer.step()
            seen += _params(model)
        return seen

    _check(pool, 2, stage, train)


# Any pattern of use


def _any_use(make: Any, rank: int | None, n: int, seed: int) -> list[Tensor]:
    """In each step each rank uses some parameters; now and then all is saved and loaded.

    `rank` None: one process, which knows what all ranks use.
    """
    random = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.ones(k, dtype=torch.float64)) for k in (3, 1, 0, 7, 5, 2)]
    anchor = nn.Parameter(torch.ones(1, dtype=torch.float64))  # a backward reaches it on each rank
    optimizer = make([*params, anchor])
    for step in range(8):
        used = torch.rand(n, len(params), generator=random) < 0.4
        rates = torch.rand(n, len(params), generator=random, dtype=torch.float64)
        if step in (3, 5):
            state = copy.deepcopy(optimizer.state_dict())
            del optimizer
            optimizer = make([*params, anchor])
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss = anchor.sum()
        for i, param in enumerate(params):
            for r in (r for r in range(n) if used[r, i] and rank in (None, r)):
                part = rates[r, i] * (param + step).square().sum()
                loss = loss + (part / n if rank is None else part)
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in (*params, anchor)]


@pytest.mark.slow
@STAGES
@SIZES
@pytest.mark.parametrize("cap", [0.0, 25.0])
def test_any_pattern_of_use_steps_as_one_process(
    pool: Any, world_size: int, stage: int, cap: float
) -> None:
    seeds = range(6)

    def run() -> list[list[Tensor]]:
        def make(params: Any) -> Any:
            return _make(stage, params, lr=0.1, bucket_cap_mb=cap)

        return [_any_use(make, dist.get_rank(), dist.get_world_size(), seed) for seed in seeds]

    def plain(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.1)

    expected = [_any_use(plain, None, world_size, seed) for seed in seeds]
    for found in pool(world_size).run(run):
        for ours, theirs in zip(found, expected, strict=True):
            _close(ours, theirs)
