"""The small GPT split over ranks: one process's losses and parameters, at the paper's traffic."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pdt.model import GPT, GPTConfig, synthetic_tokens
from pdt.plan.formulas import activation_nbytes
from pdt.tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize

WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
STEPS, B, T, V, D, L = 3, 2, 12, 33, 16, 2  # words and, on 3 ranks, heads are divided unevenly


def make(dropout: float = 0.0, bias: bool = True, unfused: bool = False) -> GPT:
    config = GPTConfig(V, T, L, 4, D, dropout, bias, unfused)
    model = GPT(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # biases that are not 0, so that none can be added twice unseen
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = synthetic_tokens(step, B, T + 1, vocab_size=V)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, : 3 + step] = -100
    return inputs, targets


def train(model: GPT) -> list[float]:
    """The losses of some steps of AdamW, each of two accumulated passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            loss = model(*batch(2 * step + half))
            loss.backward()
            losses.append(loss.item())
        if hasattr(model, "sum_partial_grads"):
            model.sum_partial_grads()
        optimizer.step()
    return losses


def own_parts(model: nn.Module) -> dict[str, tuple[int, slice]]:
    """For each split parameter the dim, and the part of it that this rank has."""
    parts: dict[str, tuple[int, slice]] = {"wte.weight": (0, model.rows)}  # type: ignore[dict-item]
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            parts |= {f"{name}.{p}": (0, module.features) for p in ("weight", "bias")}
        elif isinstance(module, RowParallelLinear):
            parts[f"{name}.weight"] = (1, module.features)
    return parts


def _trained(sequence: bool, bias: bool, unfused: bool) -> Any:
    model = parallelize(make(bias=bias, unfused=unfused), sequence=sequence)
    losses = train(model)
    params = {name: p.detach() for name, p in model.named_parameters()}
    return losses, params, own_parts(model)


@cache
def alone(bias: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = make(bias=bias)
    losses = train(model)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("bias", "unfused"), [(True, False), (False, True)])
def test_equals_one_process(
    pool: Any, world_size: int, sequence: bool, bias: bool, unfused: bool
) -> None:
    losses, whole = alone(bias)
    for found, params, parts in pool(world_size).run(_trained, sequence, bias, unfused):
        assert found == pytest.approx(losses, rel=1e-10)
        assert list(params) == list(whole)
        for name, p in params.items():
            dim, own = parts.get(name, (0, slice(None)))
            expected = whole[name][own] if dim == 0 else whole[name][:, own]
            # AdamW divides by a root: where a gradient is nearly 0, rounding is enlarged
            torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("sequence", [False, True])
def test_equals_one_process_in_shared_memory(pool: Any, sequence: bool) -> None:
    losses, _ = alone(True)
    for found, _, _ in pool(2, backend="shm").run(_trained, sequence, True, False):
        assert found == pytest.approx(losses, rel=1e-10)


def _in_groups(size: int, sequence: bool) -> tuple[float, Tensor, Tensor, int]:
    from pdt.comm import meter

    world = range(dist.get_world_size())
    groups = [dist.new_group(list(world[first : first + size])) for first in world[::size]]
    number = dist.get_rank() // size
    model = parallelize(make(), groups[number], sequence=sequence)
    with meter() as m:
        loss = model(*batch(number))  # other data in each
        loss.backward()
        model.sum_partial_grads()
        logits = model(batch(number)[0]).detach()
    assert model.wpe.weight.grad is not None
    return loss.item(), logits, model.wpe.weight.grad, sum(r.wire_nbytes for r in m.records)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("size", "world_size"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_only_the_group_is_asked(pool: Any, size: int, world_size: int, sequence: bool) -> None:
    everybody = pool(world_size).run(_in_groups, size, sequence)
    for rank, (found, logits, grad, nbytes) in enumerate(everybody):
        model = make()
        torch.testing.assert_close(logits, model(batch(rank // size)[0]).detach())
        loss = model(*batch(rank // size))
        loss.backward()
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, model.wpe.weight.grad, rtol=1e-10, atol=1e-12)
        assert (nbytes == 0) == (size == 1)


def _replicas(sequence: bool) -> Any:
    model = parallelize(make(), sequence=sequence)
    train(model)
    parts = own_parts(model)
    whole = [p.detach() for name, p in model.named_parameters() if name not in parts]
    return whole, len(list(model.partial_params()))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_every_rank_has_stays_equal_to_the_bit(pool: Any, sequence: bool) -> None:
    (first, num_partial), (second, _) = pool(2).run(_replicas, sequence)
    assert len(first) == 1 + L * (2 * 2 + 2) + 2  # positions, norms and row biases, the last norm
    assert num_partial == (len(first) if sequence else 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _logits(sequence: bool) -> Tensor:
    with torch.no_grad():
        return parallelize(make(), sequence=sequence)(batch(0)[0])


@pytest.mark.parametrize("sequence", [False, True])
def test_logits_are_whole_on_every_rank(pool: Any, sequence: bool) -> None:
    expected = make()(batch(0)[0]).detach()
    for found in pool(2).run(_logits, sequence):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _logit_grads(sequence: bool) -> Any:
    tokens, targets = batch(0)
    model = parallelize(make(), sequence=sequence)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    model.sum_partial_grads()
    return {n: p.grad for n, p in model.named_parameters()}, own_parts(model)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_loss_of_the_whole_logits_is_the_same_loss(pool: Any, sequence: bool) -> None:
    model = make()
    model(*batch(0)).backward()
    whole = {n: p.grad for n, p in model.named_parameters()}
    for grads, parts in pool(2).run(_logit_grads, sequence):
        for name, grad in grads.items():
            dim, own = parts.get(name, (0, slice(None)))
            expected = whole[name][own] if dim == 0 else whole[name][:, own]
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def _traffic(sequence: bool) -> Any:
    from pdt.comm import meter

    model = parallelize(make(), sequence=sequence)
    tokens, targets = batch(0)
    with meter() as m:
        model(tokens, targets).backward()
    passes = [(record.op, record.nbytes, record.wire_nbytes) for record in m.records]
    with meter() as m:
        model.sum_partial_grads()
    sums = [(record.op, record.nbytes) for record in m.records]
    return passes, sums, sum(p.numel() for p in model.partial_params())


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_sums_four_times_and_sends_8bsh(pool: Any, world_size: int) -> None:
    n, activations, row = world_size, 8 * B * T * D, 8 * B * T
    layers = L * 8 * B * T * D * (n - 1) / n  # elements; the embedding and the head: 2 + 2
    ends = 4 * B * T * D * (n - 1) / n
    for passes, sums, _ in pool(n).run(_traffic, False):
        calls = [(op, nbytes) for op, nbytes, _ in passes]
        loss = [("all_reduce", row), ("all_reduce", 2 * row)]
        each = [("all_reduce", activations)]
        assert calls == each * (1 + 2 * L) + loss + each * (1 + 2 * L)
        in_loss = 2 * (n - 1) / n * 3 * row
        assert sum(wire for *_, wire in passes) == 8 * (layers + ends) + in_loss
        assert sums == []


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_with_the_sequence_divided_only_inputs_are_gathered_again(
    pool: Any, world_size: int
) -> None:
    n = world_size
    once = B * T * D * (n - 1) / n
    for passes, sums, partial in pool(n).run(_traffic, True):
        sent = sum(wire for *_, wire in passes) - 2 * (n - 1) / n * 3 * 8 * B * T
        assert sent == 8 * (L * 8 * once + 4 * once + (2 * L + 1) * once)
        assert sums == [("all_reduce", 8 * partial)]


def _kept(sequence: bool, recompute: str) -> int:
    from pdt.measure import SavedActivations
    from pdt.offload import recompute_blocks

    model = parallelize(make(dropout=0.1, unfused=True).bfloat16(), sequence=sequence)
    block = recompute_blocks(model, recompute).blocks[0]
    tokens = T // dist.get_world_size() if sequence else T
    x = torch.randn(B, tokens, D, dtype=torch.bfloat16, requires_grad=True)
    with SavedActivations(block) as saved:
        out = block(x)
        nbytes = saved.nbytes
    del out
    return nbytes


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_keeps_what_korthikanti_count(pool: Any, n: int, recompute: str) -> None:
    """sbh(10 + 24/t + 5as/ht), and sbh(34 + 5as/h)/t with the sequence divided (arXiv:2205.05198,
    table 2), and the norms' statistics."""
    sizes: dict[str, Any] = {"statistic_nbytes": 2, "recompute": recompute}
    split = activation_nbytes(T, B, D, 4, tp_size=n, **sizes)
    assert pool(n).run(_kept, False, recompute) == [split] * n
    whole = activation_nbytes(T, B, D, 4, **sizes)
    assert pool(n).run(_kept, True, recompute) == [whole / n] * n


def _frozen() -> list[str]:
    model = make()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    split = parallelize(model, sequence=True)
    split(*batch(0)).backward()
    split.sum_partial_grads()
    return [name for name, p in split.named_parameters() if p.grad is not None]


def test_frozen_parameters_stay_frozen(pool: Any) -> None:
    names = [f"blocks.1.{name}" for name, _ in make().blocks[1].named_parameters()]
    assert pool(2).run(_frozen) == [names] * 2


def _too_long() -> None:
    parallelize(make(), sequence=True)(torch.zeros(1, T - 1, dtype=torch.long))


def _drawn_again() -> None:
    parallelize(make()).init_weights(0)


def _too_few_heads() -> None:
    parallelize(GPT(GPTConfig(num_heads=1, hidden_size=8)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (_too_long, r"is 11 long, no multiple of 2 ranks"),
        (_drawn_again, r"call init_weights before parallelize"),
        (_too_few_heads, r"24 features in multiples of 24 cannot be divided among 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(pool: Any, what: Any, message: str) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=message):
        pool(2).run(what)
