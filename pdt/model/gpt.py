"""A GPT-2 in one file (Radford et al. 2019), small enough to train on a laptop.

Shapes: B samples, T tokens each, D = hidden_size, V = vocab_size, nh = num_heads, hs = D / nh.
"""

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; `unfused=True` writes attention out, as the paper counts it."""

    vocab_size: int = 256
    block_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    hidden_size: int = 96
    dropout: float = 0.0
    bias: bool = True
    unfused: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "num_layers", "num_heads", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must divide hidden_size {self.hidden_size}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")

    def num_parameters(self) -> int:
        """Elements of all parameters, the tied embedding counted once."""
        D, bias = self.hidden_size, int(self.bias)
        norm = (1 + bias) * D
        layer = 12 * D * D + bias * 9 * D + 2 * norm  # qkv, proj, fc, proj; their biases; norms
        return (self.vocab_size + self.block_size) * D + self.num_layers * layer + norm


class Dropout(nn.Dropout):
    """Its mask takes one byte per element on CPU too, as `nn.Dropout`'s does on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module) -> Tensor:
    """Causal attention step by step; `q`, `k`, `v` and the result are (B, nh, T, hs)."""
    T, hs = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / hs**0.5  # (B, nh, T, T)
    # To add -inf saves nothing for backward; masked_fill would save a mask in every layer.
    scores = scores + torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    return dropout(scores.softmax(dim=-1)) @ v  # (B, nh, T, hs)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size, self.unfused = D // config.num_heads, config.unfused
        self.qkv = nn.Linear(D, 3 * D, bias=config.bias)
        self.proj = nn.Linear(D, D, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        # The head comes first within a row's index: a slice of the rows is a slice of the heads.
        qkv = self.qkv(x).unflatten(2, (-1, 3, self.head_size)).transpose(1, 2)  # (B, nh, T, 3, hs)
        y = self.core(*qkv.unbind(dim=3))  # (B, nh, T, hs)
        return self.dropout(self.proj(y.transpose(1, 2).flatten(2)))  # (B, T, D)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From queries, keys and values to what the heads found, (B, nh, T, hs) each."""
        if self.unfused:
            return unfused_attention(q, k, v, self.dropout)
        p = self.dropout.p * self.training
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=config.bias)
        self.proj = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(F.gelu(self.fc(x))))  # (B, T, D), inside (B, T, 4D)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # (B, T, D)


def initial_values(name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """Normal float32 values on CPU: any rank can make any parameter alone, in any order."""
    key = zlib.crc32(f"{seed} {name}".encode())  # a generator uses only 32 bits of its seed
    generator = torch.Generator().manual_seed(key)
    return std * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class GPT(nn.Module):
    """The model: ranks that build it with equal `config` and `seed` hold equal values."""

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.block_size, config.hidden_size)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Tie the head to the embedding and set GPT-2's initial values; call after `to_empty`."""
        self.lm_head.weight = self.wte.weight
        for name, param in self.named_parameters():
            if param.ndim == 1:
                param.fill_(name.endswith("weight"))  # norms 1, biases 0
            else:  # the residual stream is a sum of 2L projections: scaled, it stays bounded
                terms = 2 * self.config.num_layers if name.endswith("proj.weight") else 1
                param.copy_(initial_values(name, param.shape, 0.02 / terms**0.5, seed))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for `tokens` (B, T); with `targets`, the mean loss of all but -100."""
        T, limit = tokens.shape[1], self.config.block_size
        if limit < T:
            raise ValueError(f"{T} tokens exceed block_size {limit}: shorten the input")
        x = self.dropout(self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        if targets is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16: sum in fp32
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
