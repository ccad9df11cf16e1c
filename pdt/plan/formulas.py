"""Bytes of a training step in closed form: numbers in, numbers out, nothing is measured.

Letters of the papers: s tokens in a sample, b samples, h hidden size, a heads, v vocabulary,
L layers, Ψ parameters, N ranks. GB and TB are decimal (1 GB = 10⁹ bytes), as in the papers.
"""

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # tensors that it keeps for each parameter


def gpt_numel(num_layers: int, hidden_size: int, vocab_size: int, block_size: int) -> int:
    """Ψ, the parameters of a GPT with biases and a tied embedding: 12Lh² + 13Lh + (v + s)h + 2h.

    Narayanan et al. 2021, section 5.1 (arXiv:2104.04473), and the final norm's 2h, which they leave
    out; `block_size` is the s of the learnt positions.
    """
    h = hidden_size
    layer = 12 * h * h + 13 * h  # qkv 3h², proj h², fc 4h², proj 4h²; biases 9h; two norms 4h
    return num_layers * layer + (vocab_size + block_size) * h + 2 * h


def model_state_nbytes(
    numel: int, optimizer: str = "adamw", precision: str = "fp32", *, num_tensors: int = 0
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states after a step on one device, by kind.

    `precision="fp32"`: 4 + 4 bytes a parameter, and 4 for each state of the optimizer ("sgd" has
    none, "momentum" one, "adamw" two). "mixed": parameters and gradients in 16 bits, 2 + 2 bytes,
    and with the states an fp32 copy of the parameters: 2 + 2 + 12 = 16 for Adam (Rajbhandari et al.
    2020, section 3.1, arXiv:1910.02054). torch's AdamW also keeps a step count of 4 bytes for each
    of `num_tensors` parameters; papers count 0. Raises ValueError for a name it does not know.
    """
    if optimizer not in STATES or precision not in ("fp32", "mixed"):
        raise ValueError(
            f"optimizer={optimizer!r}, precision={precision!r}: take one of {', '.join(STATES)}, "
            "and fp32 or mixed"
        )
    element_nbytes, copies = (2, 1) if precision == "mixed" else (4, 0)
    steps_nbytes = 4 * num_tensors if optimizer == "adamw" else 0
    return {
        "parameters": element_nbytes * numel,
        "gradients": element_nbytes * numel,
        "optimizer states": 4 * (copies + STATES[optimizer]) * numel + steps_nbytes,
    }


def activation_nbytes(
    seq_len: int,
    batch_size: int,
    hidden_size: int,
    num_heads: int,
    *,
    element_nbytes: int = 2,
    statistic_nbytes: int = 0,
    recompute: str = "none",
    tp_size: int = 1,
) -> float:
    """What one transformer layer keeps for backward; with two-byte elements sbh(34 + 5as/h).

    Korthikanti et al. 2022, sections 4 and 5, Table 2 (arXiv:2205.05198): unfused attention, GELU,
    and dropout with masks of one byte after the softmax and after both projections. Each of two
    layer norms also keeps a mean and a deviation per token, of `statistic_nbytes` each: 4 on CUDA,
    an element's size on CPU; the paper counts 0.

    `recompute="selective"` runs the core of attention again, scores to product with V, and keeps
    34sbh; "full" runs the layer again and keeps its input, 2sbh. Tensor parallelism over `tp_size`
    ranks divides what lies between a column- and a row-parallel product:
    sbh(10 + 24/t + 5as/(ht)) on each. Where the sequence is sharded, too, everything is divided:
    take `tp_size=1` and a t-th of the result. Raises ValueError for what it does not know.
    """
    _check_recompute(recompute)
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: it is 1 or more")
    tokens = seq_len * batch_size
    sbh, as2b = tokens * hidden_size, num_heads * seq_len * tokens
    if recompute == "full":
        return element_nbytes * sbh
    whole = element_nbytes * 4 * sbh + 2 * sbh  # inputs of norms, of qkv, of fc; two masks
    whole += 2 * 2 * tokens * statistic_nbytes
    split = element_nbytes * 12 * sbh  # q, k, v 3, of proj 1, of GELU 4, of proj 4
    if recompute == "none":
        split += (2 * element_nbytes + 1) * as2b  # scores before and after dropout, its mask
    return whole + split / tp_size if tp_size > 1 else whole + split


def layer_flops(
    seq_len: int, batch_size: int, hidden_size: int, recompute: str = "none"
) -> dict[str, int]:
    """Operations of a layer's matrix products in a step: "forward", "backward", "recompute".

    Forward: 24sbh² in the products with weights, 4s²bh in the core of attention, all of its square;
    backward twice that; again what `recompute` runs a second time. Narayanan et al. 2021, appendix
    (arXiv:2104.04473); Korthikanti et al. 2022, section 5, whose overheads of 2.7 % (GPT-3) and
    1.6 % (MT-NLG) for selective recomputation are shares of forward.
    """
    _check_recompute(recompute)
    core = 4 * seq_len * seq_len * batch_size * hidden_size
    forward = 24 * seq_len * batch_size * hidden_size**2 + core
    again = {"none": 0, "selective": core, "full": forward}[recompute]
    return {"forward": forward, "backward": 2 * forward, "recompute": again}


def _check_recompute(recompute: str) -> None:
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute={recompute!r} is none of none, selective, full")


def zero_nbytes(numel: int, n: int, stage: int) -> float:
    """Model states of mixed-precision Adam on each of `n` ranks, in bytes, if Ψ divides evenly.

    Stage 0, plain data parallelism: 16Ψ. Stage 1 shards the optimizer states: 4Ψ + 12Ψ/N. Stage 2
    the gradients, too: 2Ψ + 14Ψ/N. Stage 3 all: 16Ψ/N. Rajbhandari et al. 2020, section 5 and
    Tables 1 and 2 (arXiv:1910.02054). Raises ValueError for other stages and for `n` below 1.
    """
    if stage not in (0, 1, 2, 3) or n < 1:
        raise ValueError(f"stage={stage}, n={n}: a stage is 0, 1, 2 or 3, and n at least 1")
    held = model_state_nbytes(numel, "adamw", "mixed")
    first_sharded_at = {"optimizer states": 1, "gradients": 2, "parameters": 3}
    return sum(held[kind] / (n if stage >= at else 1) for kind, at in first_sharded_at.items())
