"""The model: its size, its start, causality, and what its unfused block saves for backward."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pdt.model import GPT, PRESETS, GPTConfig, synthetic_tokens
from pdt.model.gpt import Attention, Block

SMALLEST = GPTConfig(vocab_size=11, block_size=6, num_layers=1, num_heads=2, hidden_size=8)


def batch(config: GPTConfig, num_samples: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = synthetic_tokens(1, num_samples, config.block_size + 1, vocab_size=config.vocab_size)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


@pytest.mark.parametrize("bias", [True, False])
def test_num_parameters_is_exact(bias: bool) -> None:
    shapes = itertools.product((2, 11), (1, 6), (1, 3), (1, 2), (8, 12))
    for vocab_size, block_size, num_layers, num_heads, hidden_size in shapes:
        config = GPTConfig(vocab_size, block_size, num_layers, num_heads, hidden_size, bias=bias)
        assert config.num_parameters() == sum(p.numel() for p in GPT(config).parameters())


def test_presets_have_their_stated_sizes() -> None:
    assert PRESETS["tiny"].num_parameters() == 254_592
    assert PRESETS["small"].num_parameters() == 1_853_568


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("vocab_size", 0, "vocab_size must be a positive integer, got 0"),
        ("block_size", -3, "block_size must be a positive integer, got -3"),
        ("hidden_size", 64.0, "hidden_size must be a positive integer, got 64.0"),
        ("num_heads", 3, "num_heads 3 must divide hidden_size 8"),
        ("dropout", 1.0, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_a_bad_config_is_refused_by_name_and_value(field: str, value: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        dataclasses.replace(SMALLEST, **{field: value})


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens exceed block_size 6"):
        GPT(SMALLEST)(torch.zeros(1, 7, dtype=torch.long))


def test_initial_values_do_not_depend_on_what_came_before() -> None:
    first = GPT(SMALLEST, seed=3)
    torch.manual_seed(99)
    with torch.device("meta"):
        late = GPT(SMALLEST, seed=3)
    late.to_empty(device="cpu").init_weights(3)
    for name, param in first.named_parameters():
        assert torch.equal(param, late.get_parameter(name)), name
    deeper = GPT(dataclasses.replace(SMALLEST, num_layers=2), seed=3)
    assert torch.equal(first.wte.weight, deeper.wte.weight)
    name = "blocks.0.mlp.fc.weight"
    assert torch.equal(first.get_parameter(name), deeper.get_parameter(name))


def test_initial_values_depend_on_the_seed_and_differ_between_layers() -> None:
    model = GPT(dataclasses.replace(SMALLEST, num_layers=2), seed=3)
    assert not torch.equal(model.wte.weight, GPT(SMALLEST, seed=4).wte.weight)
    layers = [model.get_parameter(f"blocks.{i}.mlp.fc.weight") for i in range(2)]
    assert not torch.equal(*layers)


def test_initial_values_are_those_of_gpt_2() -> None:
    model = GPT(PRESETS["small"])
    for name, param in model.named_parameters():
        if param.ndim == 1:
            assert param.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        else:
            std = 0.02 / 8**0.5 if name.endswith("proj.weight") else 0.02
            assert param.std().item() == pytest.approx(std, rel=0.03), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_starts_from_the_same_values(dtype: torch.dtype) -> None:
    model = GPT(SMALLEST)
    wanted = {name: param.to(dtype) for name, param in model.named_parameters()}
    converted = GPT(SMALLEST).to(dtype)
    assert all(torch.equal(p, wanted[name]) for name, p in converted.named_parameters())
    loss = converted(*batch(SMALLEST))
    loss.backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert all(p.grad is not None and p.grad.dtype == dtype for p in converted.parameters())


def test_the_head_stays_tied_to_the_embedding() -> None:
    model = GPT(SMALLEST)
    model.load_state_dict(GPT(SMALLEST, seed=1).state_dict())
    model.double()
    assert model.lm_head.weight is model.wte.weight
    model(*batch(SMALLEST)).backward()
    torch.optim.AdamW(model.parameters()).step()
    assert model.lm_head.weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_unfused_attention_equals_fused() -> None:
    config = dataclasses.replace(SMALLEST, num_layers=2)
    fused = GPT(config).double()
    unfused = GPT(dataclasses.replace(config, unfused=True)).double()
    for model in (fused, unfused):
        model(*batch(config)).backward()
    for name, param in fused.named_parameters():
        torch.testing.assert_close(unfused.get_parameter(name).grad, param.grad, msg=name)


@pytest.mark.parametrize("unfused", [False, True])
def test_no_token_sees_a_later_one(unfused: bool) -> None:
    model = GPT(dataclasses.replace(SMALLEST, unfused=unfused)).double()
    tokens, _ = batch(SMALLEST)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % SMALLEST.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=1e-12)
    assert (before[:, 4:] - after[:, 4:]).abs().amax(dim=-1).min() > 1e-6


def test_the_loss_is_the_mean_over_targets_that_are_not_ignored() -> None:
    model = GPT(SMALLEST).double()
    tokens, targets = batch(SMALLEST)
    targets[0], targets[1, 3:] = -100, -100
    kept = targets != -100
    wanted = F.cross_entropy(model(tokens)[kept], targets[kept])
    torch.testing.assert_close(model(tokens, targets), wanted)


def test_heads_are_slices_of_the_qkv_rows() -> None:
    D, hs, rows = 8, 4, 12
    whole = Attention(SMALLEST).double()
    x = torch.randn(2, 5, D, dtype=torch.float64)
    parts = []
    for head in range(2):
        part = Attention(SMALLEST).double()
        part.qkv = nn.Linear(D, rows, dtype=torch.float64)
        part.proj = nn.Linear(hs, D, bias=False, dtype=torch.float64)
        with torch.no_grad():
            part.qkv.weight.copy_(whole.qkv.weight[head * rows : (head + 1) * rows])
            part.qkv.bias.copy_(whole.qkv.bias[head * rows : (head + 1) * rows])
            part.proj.weight.copy_(whole.proj.weight[:, head * hs : (head + 1) * hs])
        parts.append(part(x))
    torch.testing.assert_close(parts[0] + parts[1] + whole.proj.bias, whole(x))


def saved_nbytes(block: Block, x: torch.Tensor) -> int:
    """Bytes of the storages that `block` keeps for backward, without its parameters."""
    skip = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
        return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("s", "b", "h", "a"), [(16, 2, 32, 4), (24, 3, 40, 5), (8, 1, 16, 2)])
def test_unfused_block_saves_what_korthikanti_count(s: int, b: int, h: int, a: int) -> None:
    """sbh(34 + 5as/h) (arXiv:2205.05198, section 4.1) and the statistics of two norms."""
    config = GPTConfig(block_size=s, num_heads=a, hidden_size=h, dropout=0.1, unfused=True)
    block = Block(config).bfloat16()
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    statistics = 2 * (2 * s * b) * torch.bfloat16.itemsize
    assert saved_nbytes(block, x) == 34 * s * b * h + 5 * a * s * s * b + statistics


@pytest.mark.parametrize("unfused", [False, True])
def test_dropout_acts_in_training_only(unfused: bool) -> None:
    model = GPT(dataclasses.replace(SMALLEST, dropout=0.5, unfused=unfused))
    tokens, targets = batch(SMALLEST)
    assert not torch.equal(model(tokens, targets), model(tokens, targets))
    model.eval()
    assert torch.equal(model(tokens, targets), model(tokens, targets))
    plain = GPT(dataclasses.replace(SMALLEST, unfused=unfused))
    assert torch.equal(model(tokens, targets), plain(tokens, targets))


def test_the_same_run_twice_gives_the_same_bits() -> None:
    def run() -> list[float]:
        model = GPT(SMALLEST, seed=5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            loss = model(*batch(SMALLEST))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert run() == run()


@pytest.mark.gpu
def test_a_gpu_starts_from_the_same_values_and_agrees() -> None:
    with torch.device("cuda"):
        model = GPT(SMALLEST).double()
    on_cpu = GPT(SMALLEST).double()
    for name, param in on_cpu.named_parameters():
        assert torch.equal(model.get_parameter(name).cpu(), param), name
    tokens, targets = batch(SMALLEST)
    loss = model(tokens.cuda(), targets.cuda())
    torch.testing.assert_close(loss.cpu(), on_cpu(tokens, targets))
