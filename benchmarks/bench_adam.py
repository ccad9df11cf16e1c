"""AdamW on the host: what each way of a step reaches of the memory's pace.

    python benchmarks/bench_adam.py [--threads 1 2] [--millions 1 4 16 64 256] [--quick]

A step of one flat float32 tensor by each way, in turn with STREAM's triad (same compiler, same
threads, 16 bytes an element: its write costs a read too). `share` is the bytes per second of the
step, by `bytes_per_element(..., write_allocate=True)`, over the triad's in the same round. `fused +
passes` unscales the gradient and makes a bfloat16 copy in passes of their own, which `one pass`
does as it goes; `in chunks` is the same by torch alone. `against it` is the ratio of times to
`fused + passes`. Then a model of 300 small tensors, by optimizers: what calls cost. Medians of
rounds, with the 10th and 90th percentile of the share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _common import table, write_results
from torch import Tensor, nn

from pdt.measure.stats import interleave, median, paired, summary
from pdt.offload import kernel
from pdt.offload.adam import (
    HostAdamW,
    adamw_foreach,
    adamw_fused,
    adamw_in_chunks,
    adamw_loop,
    adamw_one_pass,
    bytes_per_element,
)
from pdt.offload.adam_steps import TRIAD_NBYTES

SCALE = 1.0001  # not 1, which torch's way leaves out
BESIDE: dict[str, Any] = {"scaled": True, "copy_nbytes": 2}
NBYTES = {
    "loop": bytes_per_element("loop", write_allocate=True),
    "foreach": bytes_per_element("foreach", write_allocate=True),
    "fused": bytes_per_element("fused", write_allocate=True),
    "fused + passes": bytes_per_element("fused", write_allocate=True, **BESIDE),
    "in chunks": bytes_per_element("one_pass", write_allocate=True, **BESIDE),
    "one pass": bytes_per_element("one_pass", write_allocate=True, **BESIDE),
}


def deepspeed_step(params: list[Tensor], grads: list[Tensor]) -> Callable[[], object] | None:
    """A step of DeepSpeed's CPUAdam, where it can be imported."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except Exception:
        return None
    param = nn.Parameter(params[0].clone())
    param.grad = grads[0]
    return DeepSpeedCPUAdam([param], adamw_mode=True).step


def ways(numel: int) -> dict[str, Callable[[], object]]:
    """Each way as a function of nothing, all on the same memory, and the triad."""
    p, g = torch.randn(numel), torch.randn(numel)
    m, v, a = (torch.zeros(numel) for _ in range(3))
    low = torch.zeros(numel, dtype=torch.bfloat16)
    step = ([p], [g], [m], [v], 10)

    def separate() -> None:
        g.mul_(1 / SCALE)
        adamw_fused(*step)
        low.copy_(p)

    def triad() -> None:
        if kernel.available():
            kernel.get().triad(a, p, g, 3.0)
        else:
            torch.add(p, g, alpha=3.0, out=a)

    found: dict[str, Callable[[], object]] = {
        "triad": triad,
        "loop": lambda: adamw_loop(*step),
        "foreach": lambda: adamw_foreach(*step),
        "fused": lambda: adamw_fused(*step),
        "in chunks": lambda: adamw_in_chunks(*step, grad_scale=SCALE, copies=[low]),
        "fused + passes": separate,
        "one pass": lambda: adamw_one_pass(*step, grad_scale=SCALE, copies=[low]),
    }
    if not kernel.available():
        del found["one pass"]
    if (theirs := deepspeed_step([p], [g])) is not None:
        found["deepspeed"] = theirs
    return found


def measure(numel: int, repeats: int) -> list[dict[str, Any]]:
    times_s = interleave(ways(numel), repeats, warmup=1)
    triad_s, rows = times_s["triad"], []
    for name, seconds in times_s.items():
        nbytes = NBYTES.get(name, TRIAD_NBYTES if name == "triad" else NBYTES["fused"])
        pace = paired(triad_s, seconds)
        against = paired(seconds, times_s["fused + passes"])
        rows.append(
            {
                "threads": torch.get_num_threads(),
                "numel": numel,
                "way": name,
                "time_ms": 1e3 * median(seconds),
                "bytes per element": nbytes,
                "bytes_per_s": nbytes * numel / median(seconds),
                "share": pace.median * nbytes / TRIAD_NBYTES,
                "share low": pace.low * nbytes / TRIAD_NBYTES,
                "share high": pace.high * nbytes / TRIAD_NBYTES,
                "against it": against.median,
            }
        )
    return rows


def small_tensors(repeats: int) -> list[dict[str, Any]]:
    """Steps of 300 parameters of 64 to 4,096 elements: what the calls cost."""
    numels = [64, 256, 4096] * 100

    def made(how: Callable[..., torch.optim.Optimizer], **more: Any) -> Callable[[], object]:
        params = [nn.Parameter(torch.randn(numel)) for numel in numels]
        for param in params:
            param.grad = torch.randn(param.shape)
        return how(params, **more).step

    times_s = interleave(
        {
            "AdamW(foreach=False)": made(torch.optim.AdamW, foreach=False),
            "AdamW(foreach=True)": made(torch.optim.AdamW, foreach=True),
            "AdamW(fused=True)": made(torch.optim.AdamW, fused=True),
            "HostAdamW(compiled=False)": made(HostAdamW, compiled=False),
            "HostAdamW()": made(HostAdamW),
        },
        repeats,
        warmup=3,
    )
    return [
        {
            "threads": torch.get_num_threads(),
            "tensors": len(numels),
            "optimizer": name,
            "time_ms": 1e3 * summary(seconds).median,
            "against fused": paired(seconds, times_s["AdamW(fused=True)"]).median,
        }
        for name, seconds in times_s.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--quick", action="store_true", help="small sizes, fewer rounds")
    args = parser.parse_args()
    flat: list[dict[str, Any]] = []
    many: list[dict[str, Any]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for millions in [m for m in args.millions if m <= 16 or not args.quick]:
            numel = millions * 2**20
            rounds = max(5, min(31, 2**28 // numel)) // (2 if args.quick else 1)
            flat += measure(numel, rounds)
        many += small_tensors(11 if args.quick else 31)
    print(table(flat, floatfmt=".3g"), "", table(many, floatfmt=".3g"), sep="\n")
    if kernel.why_not():
        print(f"Without the compiled kernel: {kernel.why_not()}")
    if not any(row["way"] == "deepspeed" for row in flat):
        print("DeepSpeed's CPUAdam is not installed here, and was left out.")
    print(write_results("adam", flat, small_tensors=many, compiled=kernel.available()))


if __name__ == "__main__":
    main()
