"""What has gone wrong in split layers elsewhere: biases, terms of gradients, heads, dropouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.model import GPT, GPTConfig, synthetic_tokens
from pdt.tensor_parallel import (
    ColumnParallelLinear,
    GroupedAttention,
    OwnDropout,
    ParallelGroupedAttention,
    RowParallelLinear,
    gather_sequence,
    own_part,
    own_stream,
    parallelize,
    stream,
    sum_partial_grads,
)
from pdt.tensor_parallel.attention import divide_heads

WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


def row_layer(hidden: int = 6) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(hidden, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(1, 5) * 100.0)
    return layer


def _biased(hidden: int, tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 2, 2 * tokens * hidden, dtype=torch.float64).view(2, tokens, hidden)
    split = RowParallelLinear(row_layer(hidden))
    out = split(x[..., split.features].contiguous())
    out.square().sum().backward()
    assert split.bias is not None
    assert split.bias.grad is not None
    return out.detach(), split.bias.grad


@pytest.mark.parametrize(("hidden", "tokens"), [(6, 4), (5, 3)])  # and what 2 does not divide
def test_a_row_bias_in_the_hundreds_is_added_once(pool: Any, hidden: int, tokens: int) -> None:
    layer = row_layer(hidden)
    x = torch.linspace(-1, 2, 2 * tokens * hidden, dtype=torch.float64).view(2, tokens, hidden)
    out = layer(x)
    out.square().sum().backward()
    assert layer.bias.grad is not None
    for found, grad in pool(2).run(_biased, hidden, tokens):
        torch.testing.assert_close(found, out.detach(), rtol=1e-14, atol=1e-12)
        torch.testing.assert_close(grad, layer.bias.grad, rtol=1e-14, atol=1e-11)


def _undivided() -> None:
    RowParallelLinear(row_layer(5))(torch.ones(2, 5, dtype=torch.float64))


def test_an_input_that_is_not_this_ranks_part_is_refused(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"has 5 features, this rank's part of 5 is [23]"):
        pool(2).run(_undivided)


def _in_low_precision() -> tuple[Any, ...]:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 6)
    a, b = ColumnParallelLinear(first), RowParallelLinear(second)
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = second(torch.tanh(first(x))), b(torch.tanh(a(x)))
    found.float().sum().backward()
    assert a.weight.grad is not None
    return found.dtype, a.weight.grad.dtype, found.detach(), expected.detach()


def test_autocast_computes_backward_too(pool: Any) -> None:
    for out_dtype, grad_dtype, found, expected in pool(2).run(_in_low_precision):
        assert (out_dtype, grad_dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def grouped(num_heads: int, num_kv_heads: int, bias: bool) -> GroupedAttention:
    torch.manual_seed(num_kv_heads)
    return GroupedAttention(num_heads * 4, num_heads, num_kv_heads, bias=bias).double()


def sample(num_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, num_heads * 4, dtype=torch.float64, generator=generator)


def _attended(num_heads: int, num_kv_heads: int, bias: bool, sequence: bool) -> Any:
    from pdt.comm import meter

    whole = grouped(num_heads, num_kv_heads, bias)
    layer = ParallelGroupedAttention(whole, sequence_dim=1 if sequence else None)
    x = own_part(sample(num_heads)).clone() if sequence else sample(num_heads)
    x.requires_grad_()
    with meter() as m:
        out = layer(x)
        out.square().sum().backward()
    assert x.grad is not None
    out, grad = out.detach(), x.grad
    if sequence:
        out, grad = gather_sequence(out), gather_sequence(grad)
        if layer.proj.bias is not None:
            sum_partial_grads([layer.proj.bias])
    grads = {name: p.grad for name, p in layer.named_parameters()}
    rows = {name: getattr(layer, name).rows for name in "qkv"}
    ops = [record.nbytes for record in m.records if record.nbytes >= x.nbytes]
    return out, grad, grads, rows, layer.proj.features, len(ops)


def check_attention(found: Any, whole: GroupedAttention, out: Tensor, grad_x: Tensor) -> None:
    found_out, found_grad, grads, rows, features, _ = found
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found_out, out, **close)
    torch.testing.assert_close(found_grad, grad_x, **close)
    for name, p in whole.named_parameters():
        layer = name.split(".")[0]
        expected = p.grad
        assert expected is not None
        if layer in rows:
            expected = expected[rows[layer]]
        elif name == "proj.weight":
            expected = expected[:, features]
        torch.testing.assert_close(grads[name], expected, **close, msg=name)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (5, 1)])
def test_shared_keys_and_values_have_the_gradient_of_all_heads(
    pool: Any, world_size: int, heads: tuple[int, int], sequence: bool
) -> None:
    bias = heads != (4, 2)
    whole, x = grouped(*heads, bias), sample(heads[0]).requires_grad_()
    out = whole(x)
    out.square().sum().backward()
    assert x.grad is not None
    everybody = pool(world_size).run(_attended, *heads, bias, sequence)
    for found in everybody:
        check_attention(found, whole, out.detach(), x.grad)
    if world_size > heads[1]:
        for name in ("k.weight", "v.weight"):  # replicas stay equal to the bit
            assert all(torch.equal(found[2][name], everybody[0][2][name]) for found in everybody)
    if not sequence:
        assert [found[-1] for found in everybody] == [2] * world_size


def test_grouped_attention_is_torchs() -> None:
    layer, x = grouped(6, 2, True), sample(6)
    q, k, v = (p.unflatten(2, (-1, 4)).transpose(1, 2) for p in layer.project(x))
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.proj(y.transpose(1, 2).flatten(2)))


def test_four_heads_of_keys_serve_eight_ranks() -> None:
    found = [divide_heads(16, 4, rank, 8) for rank in range(8)]
    assert all(heads.is_replicated for heads in found)
    assert [heads.queries for heads in found] == [slice(2 * r, 2 * r + 2) for r in range(8)]
    assert [heads.keys for heads in found] == [slice(r // 2, r // 2 + 1) for r in range(8)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "n"), [(12, 4, 5), (7, 1, 3), (6, 3, 2)])
def test_every_head_is_somebodys_and_finds_its_keys(
    num_heads: int, num_kv_heads: int, n: int
) -> None:
    found = [divide_heads(num_heads, num_kv_heads, rank, n) for rank in range(n)]
    of = [h.keys.start + key for h in found for key in h.key_of]
    assert of == [q // (num_heads // num_kv_heads) for q in range(num_heads)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((4, 2, 0, 8), "4 heads are too few for 8 ranks: .* use 4 ranks at most"),
        ((6, 4, 0, 2), "num_kv_heads 4 must divide num_heads 6"),
        ((6, 0, 0, 2), "num_kv_heads 0 must divide num_heads 6"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divide_heads(*args)


def _large_vocabulary() -> tuple[Tensor, Tensor, slice]:
    from pdt.tensor_parallel import vocab_parallel_cross_entropy
    from pdt.tensor_parallel.linear import own_slice

    logits, targets, own = *words(), own_slice(50257)
    mine = logits[:, own].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, targets, 50257, label_smoothing=0.1)
    loss.backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad, own


def words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 50257, dtype=torch.float64, generator=generator)
    return logits, torch.tensor([0, 25128, 50256])  # both ends, and the last of rank 0


def test_a_vocabulary_of_50257_has_no_padded_words(pool: Any) -> None:
    logits, targets = words()
    logits.requires_grad_()
    loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    loss.backward()
    assert logits.grad is not None
    found = pool(2).run(_large_vocabulary)
    assert [own for *_, own in found] == [slice(0, 25129), slice(25129, 50257)]
    for ours, grad, own in found:
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, logits.grad[:, own], rtol=1e-9, atol=1e-16)


def _gathered_head() -> None:
    from pdt.tensor_parallel import vocab_parallel_cross_entropy

    split = parallelize(GPT(GPTConfig(vocab_size=16, hidden_size=8, num_heads=2)))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    logits = split(tokens).flatten(0, 1)  # those of the whole vocabulary
    vocab_parallel_cross_entropy(logits, tokens.flatten(), 16)


def test_whole_logits_of_a_split_head_are_refused(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"this rank's 8 words of 16 .*got \(4, 16\): gathered"):
        pool(2).run(_gathered_head)


def _masks() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.ones(4096)
    if dist.get_rank() == 0:
        torch.rand(7)  # a data loader draws on one rank: without `stream`, they disagree from here
    with stream(0, 1):
        replicated = nn.functional.dropout(x)
        own = OwnDropout(0.5)(x)
        after = nn.functional.dropout(x)
    return replicated != 0, own != 0, after != 0


def test_replicas_drop_alike_and_parts_differently(pool: Any) -> None:
    first, second = pool(2).run(_masks)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    seen = [first[1], second[1], first[0], first[2]]
    for i, a in enumerate(seen):  # independent: half of the elements agree, +- 6 deviations
        for b in seen[:i]:
            assert abs(int((a == b).sum()) - 2048) < 6 * 32


def test_a_stream_follows_from_its_key_and_leaves_the_outside_alone() -> None:
    torch.manual_seed(3)
    torch.rand(1)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(1)
    drawn = []
    for key in [(0, 1), (0, 1), (1, 0), (0, 1, 0), (0, 11)]:
        with stream(*key):
            drawn.append(torch.rand(64))
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(drawn[0], drawn[1])
    others = [drawn[0], *drawn[2:]]
    assert not any(torch.equal(a, b) for i, a in enumerate(others) for b in others[:i])
    with pytest.raises(KeyError), stream(0):
        raise KeyError
    torch.manual_seed(3)
    with stream(5):
        torch.manual_seed(9)
    assert torch.equal(torch.rand(5)[1:], expected)


def _own_streams_in_turn() -> list[Tensor]:
    torch.manual_seed(0)
    drawn = []
    for _ in range(2):
        with own_stream():
            drawn.append(torch.rand(8))
    return drawn


def test_two_regions_of_one_rank_draw_differently(pool: Any) -> None:
    drawn = [d for rank in pool(2).run(_own_streams_in_turn) for d in rank]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def make(unfused: bool, dropout: float = 0.3) -> GPT:
    return GPT(GPTConfig(17, 8, 2, 2, 8, dropout, unfused=unfused)).double()


def _dropped_where(sequence: bool, unfused: bool) -> tuple[dict[str, Tensor], Tensor]:
    model = parallelize(make(unfused, 0.5), sequence=sequence)
    block, ones = model.blocks[0], torch.ones(2, 1, 8, 8, dtype=torch.float64)
    torch.manual_seed(0)
    found = {
        "heads": block.attn.core(ones, ones, ones),
        "embedding": model.dropout(ones),
        "attention": block.attn.dropout(ones),
        "mlp": block.mlp.dropout(ones),
    }
    return {name: out.detach() for name, out in found.items()}, torch.get_rng_state()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("unfused", [False, True])
def test_heads_and_divided_tokens_are_dropped_differently(
    pool: Any, sequence: bool, unfused: bool
) -> None:
    (first, state), (second, other) = pool(2).run(_dropped_where, sequence, unfused)
    alike = {name for name in first if torch.equal(first[name], second[name])}
    assert alike == (set() if sequence else {"embedding", "attention", "mlp"})
    assert torch.equal(state, other)


def _checkpoints() -> dict[str, Callable[..., Any]]:
    from torch.utils.checkpoint import checkpoint as torchs

    from pdt.offload.checkpoint import checkpoint

    return {
        "none": lambda fn, x: fn(x),
        "pdt": checkpoint,
        "torch": lambda fn, x: torchs(fn, x, use_reentrant=False),
    }


class _Again(nn.Module):
    """A block that is checkpointed."""

    def __init__(self, block: nn.Module, how: str) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x: Tensor) -> Tensor:
        return _checkpoints()[self.how](self.block, x)


def _dropped(how: str, sequence: bool, unfused: bool) -> tuple[float, list[Tensor], list[int]]:
    from pdt.offload import recompute_blocks

    model = parallelize(make(unfused), sequence=sequence)
    if how == "selective":
        recompute_blocks(model, how)
    else:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = _Again(block, how)
    tokens = synthetic_tokens(0, 2, 9, vocab_size=17)
    if dist.get_rank() == 0:
        torch.rand(3)
    with stream(7, 0):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.rand(5)  # the recomputation must not depend on where the stream is in backward
    loss.backward()
    model.sum_partial_grads()
    grads, replicated = [], []
    for name, p in model.named_parameters():
        assert p.grad is not None
        if "ln_" in name or "proj.bias" in name or "wpe" in name:
            replicated.append(len(grads))
        grads.append(p.grad)
    return loss.item(), grads, replicated


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("unfused", [False, True])
def test_recomputation_drops_the_same_again(pool: Any, sequence: bool, unfused: bool) -> None:
    plain = pool(2).run(_dropped, "none", sequence, unfused)
    (loss, first, replicated), (other_loss, second, _) = plain
    assert loss == other_loss
    assert all(torch.equal(first[i], second[i]) for i in replicated)
    for how in ("pdt", "torch", "selective"):
        for (loss, grads, _), (found, again, _) in zip(
            plain, pool(2).run(_dropped, how, sequence, unfused), strict=True
        ):
            assert found == loss
            assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


def _evaluated() -> tuple[float, bool]:
    model = parallelize(make(False).eval(), sequence=True)
    state = torch.get_rng_state()
    tokens = synthetic_tokens(0, 2, 9, vocab_size=17)
    loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    return loss, torch.equal(state, torch.get_rng_state())


def test_evaluation_drops_nothing_and_draws_nothing(pool: Any) -> None:
    tokens = synthetic_tokens(0, 2, 9, vocab_size=17)
    expected = make(False).eval()(tokens[:, :-1], tokens[:, 1:]).item()
    for loss, is_untouched in pool(2).run(_evaluated):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert is_untouched
