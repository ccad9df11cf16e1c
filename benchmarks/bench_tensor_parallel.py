"""Layers split over 2 ranks beside DTensor's `parallelize_module`: steps in turn, in one run.

    python benchmarks/bench_tensor_parallel.py [--quick]

The same layers, values and batch; DTensor's plan is torch's own for such a model, columns then
rows, with local tensors between them. An MLP pair and GPT blocks, narrow and wide, on gloo and in
shared memory; forward and backward alone, and with a step of AdamW. For each: the ratio of paired
times (below 1: pdt is faster; the aim is 0.83), its 10th and 90th percentile, and what a rank
sends, in elements beside the paper's 4bsh(t-1)/t a pair (Narayanan et al. 2021, section 3).
Before anything is timed, both must have the same output and gradients.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _common import table, write_results
from torch import nn

from pdt import Ranks
from pdt.measure.stats import interleave, median, paired
from pdt.model import GPTConfig
from pdt.model.gpt import MLP, Block

Shape = tuple[int, int, int]  # samples, tokens, hidden size
LAYERS = 4
SHAPES: dict[str, Shape] = {"narrow": (2, 32, 64), "middle": (4, 64, 192), "wide": (4, 128, 384)}
COLUMNS, ROWS = ("attn.qkv", "mlp.fc", "fc"), ("attn.proj", "mlp.proj", "proj")


def make(kind: str, hidden_size: int) -> nn.Module:
    """Pairs alone, or whole blocks: norms, residuals and attention with its pair."""
    torch.manual_seed(0)
    config = GPTConfig(num_heads=hidden_size // 32, hidden_size=hidden_size)
    layer = MLP if kind == "pairs" else Block
    return nn.Sequential(*[layer(config) for _ in range(LAYERS)])


def ours(model: nn.Module) -> nn.Module:
    from pdt.tensor_parallel import ColumnParallelLinear, ParallelAttention, RowParallelLinear

    for layer in model.children():
        mlp: Any = layer if isinstance(layer, MLP) else layer.mlp
        mlp.fc, mlp.proj = ColumnParallelLinear(mlp.fc), RowParallelLinear(mlp.proj)
        if isinstance(layer, Block):
            layer.attn = ParallelAttention(layer.attn)
    return model


def theirs(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        names = [name for name, _ in layer.named_modules()]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS if name in names}
        plan |= {name: RowwiseParallel() for name in ROWS if name in names}
        parallelize_module(layer, mesh, plan)
    return model


def passes(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    passes(model, x)
    optimizer.step()


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(a: nn.Module, b: nn.Module, x: torch.Tensor) -> None:
    """The same output and gradients, or the race is void."""
    torch.testing.assert_close(a(x), b(x), rtol=1e-4, atol=1e-5)
    for model in (a, b):
        passes(model, x)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(local(p.grad), local(q.grad), rtol=1e-3, atol=1e-6, msg=name)


def sent_numel(fn: Callable[[], object]) -> float:
    from pdt.comm import meter

    with meter() as m:
        fn()
    return sum(record.wire_nbytes for record in m.records) / 4


def measure(kind: str, shape: Shape, repeats: int) -> list[dict[str, Any]]:
    """In a rank: ratios of paired times, and what was sent."""
    module = make(kind, shape[-1])
    x = torch.randn(shape, requires_grad=True)  # so that the first layer has a gradient to sum
    a, b = ours(copy.deepcopy(module)), theirs(copy.deepcopy(module))
    check(a, b, x)
    steps = {
        name: partial(step, model, x, torch.optim.AdamW(model.parameters(), lr=1e-4))
        for name, model in (("pdt", a), ("torch", b))
    }
    alone = {"pdt": partial(passes, a, x), "torch": partial(passes, b, x)}
    n, pairs = dist.get_world_size(), LAYERS * (1 if kind == "pairs" else 2)
    formula = pairs * 4 * x.numel() * (n - 1) / n
    rows = []
    for what, fns in (("passes", alone), ("step", steps)):
        times_s = interleave(fns, repeats, warmup=3, before=dist.barrier)
        ratio = paired(times_s["pdt"], times_s["torch"])
        rows.append(
            {
                "what": what,
                "pdt/torch": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "pdt_ms": 1e3 * median(times_s["pdt"]),
                "torch_ms": 1e3 * median(times_s["torch"]),
                "sent/formula": sent_numel(fns["pdt"]) / formula,
                "torch sent/formula": sent_numel(fns["torch"]) / formula,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without a file")
    args = parser.parse_args()
    rows = []
    for wire in ("gloo", "shm"):
        with Ranks(2, backend=wire, timeout_s=300) as ranks:
            for kind in ("pairs", "blocks"):
                for size, shape in SHAPES.items():
                    repeats = 12 if args.quick else 40
                    found = ranks.run(measure, kind, shape, repeats)[0]
                    rows += [{"wire": wire, "layers": kind, "size": size, **row} for row in found]
                    print(table(rows[-2:], floatfmt=".3g"), flush=True)
    print(table(rows, floatfmt=".3g"))
    if not args.quick:
        print(write_results("tensor_parallel", rows, ranks=2, num_layers=LAYERS))


if __name__ == "__main__":
    main()
