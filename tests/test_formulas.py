"""The byte formulas, held to the papers' tables and to what torch really allocates."""

import json
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pdt.measure import Ledger, saved_activations
from pdt.model import GPT, GPTConfig
from pdt.model.gpt import Block
from pdt.offload.checkpoint import checkpoint
from pdt.plan.formulas import (
    activation_nbytes,
    gpt_numel,
    layer_flops,
    model_state_nbytes,
    zero_nbytes,
)

DATA = Path(__file__).parent / "data"
ZERO = json.loads((DATA / "zero_tables.json").read_text())
MODELS = json.loads((DATA / "megatron_models.json").read_text())["rows"]
NUMEL = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
CELLS = [
    (model, int(stage), n, printed)
    for model, stages in ZERO["table1_GB"].items()
    for stage, row in stages.items()
    for n, printed in zip(ZERO["table1_ranks"], row, strict=True)
]


def last_digit(printed: str) -> float:
    """The unit of the last digit: 0.01 of 1.88."""
    exponent = Decimal(printed).as_tuple().exponent
    assert isinstance(exponent, int)
    return 10.0 ** min(exponent, 0)


def test_table_1_of_zero_has_its_54_cells() -> None:
    assert len(CELLS) == 54


@pytest.mark.parametrize(("model", "stage", "n", "printed"), CELLS)
def test_table_1_of_zero_to_the_last_digit(model: str, stage: int, n: int, printed: str) -> None:
    gigabytes = zero_nbytes(NUMEL[model], n, stage) / 1e9
    assert abs(gigabytes - float(printed)) < last_digit(printed)  # some are cut, some rounded


@pytest.mark.parametrize("model", NUMEL)
def test_one_rank_is_exact(model: str) -> None:
    printed = {row[0] for row in ZERO["table1_GB"][model].values()}
    assert {f"{zero_nbytes(NUMEL[model], 1, stage) / 1e9:g}" for stage in range(4)} == printed


@pytest.mark.parametrize("model_parallel", ZERO["table2_billions"])
@pytest.mark.parametrize("stage", range(4))
def test_table_2_of_zero_to_the_last_digit(model_parallel: str, stage: int) -> None:
    """The largest model in 32 GB on 64 ranks; the paper multiplies its rounded first row."""
    printed = ZERO["table2_billions"][model_parallel][stage]
    first_row = round(32 / zero_nbytes(1, 64, stage), 1)  # billions
    billions = int(model_parallel) * first_row
    if printed.endswith("T"):
        assert round(billions / 1000, 1) == float(printed.removesuffix("T"))
    else:
        assert round(billions, 1) == float(printed)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: f"{row['billions']}B")
def test_megatrons_models_to_the_last_digit(row: dict) -> None:
    shape = {key: value for key, value in row.items() if key != "billions"}
    assert round(gpt_numel(**shape) / 1e9, 1) == row["billions"]


@pytest.mark.parametrize("config", [GPTConfig(), GPTConfig(37, 19, 3, 5, 35)])
def test_gpt_numel_counts_every_parameter(config: GPTConfig) -> None:
    numel = gpt_numel(config.num_layers, config.hidden_size, config.vocab_size, config.block_size)
    assert numel == sum(param.numel() for param in GPT(config).parameters())


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_model_states_are_what_the_ledger_counts(optimizer: str, precision: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 5, bias=False))
    if precision == "mixed":
        model.bfloat16()
    params = list(model.parameters())
    trained = [torch.nn.Parameter(p.detach().float()) for p in params]  # master copies
    stepper = OPTIMIZERS[optimizer](trained if precision == "mixed" else params)
    with Ledger(model=model, optimizer=stepper) as ledger:
        model(torch.ones(2, 7, dtype=params[0].dtype)).sum().backward()
        if precision == "mixed":
            for param, copy in zip(params, trained, strict=True):
                copy.grad = param.grad.float()
        stepper.step()
        for copy in trained:
            copy.grad = None
    numel = sum(p.numel() for p in params)
    formula = model_state_nbytes(numel, optimizer, precision, num_tensors=len(params))
    assert {kind: ledger.live()[kind] for kind in formula} == formula


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("s", "b", "h", "a"), [(16, 2, 24, 3), (7, 3, 10, 1), (1, 1, 8, 8)])
def test_a_layer_keeps_what_the_formula_says(
    recompute: str, dtype: torch.dtype, s: int, b: int, h: int, a: int
) -> None:
    config = GPTConfig(block_size=s, num_heads=a, hidden_size=h, dropout=0.1, unfused=True)
    layer = Block(config).to(dtype)
    if recompute == "selective":
        layer.attn.core = partial(checkpoint, layer.attn.core)
    called = partial(checkpoint, layer) if recompute == "full" else layer
    x = torch.ones(b, s, h, dtype=dtype, requires_grad=True)
    kept = sum(tensor.nbytes for tensor in saved_activations(called, x, model=layer))
    nbytes = dtype.itemsize
    assert kept == activation_nbytes(
        s, b, h, a, element_nbytes=nbytes, statistic_nbytes=nbytes, recompute=recompute
    )


@pytest.mark.parametrize("t", [1, 2, 8])
def test_two_bytes_an_element_give_the_papers_formulas(t: int) -> None:
    for s, b, h, a in ((2048, 1, 12288, 96), (2048, 1, 20480, 128)):  # GPT-3 and MT-NLG
        sbh, square = s * b * h, 5 * a * s / h
        assert activation_nbytes(s, b, h, a, tp_size=t) == sbh * (10 + 24 / t + square / t)
        kept = activation_nbytes(s, b, h, a, tp_size=t, recompute="selective")
        assert kept == sbh * (10 + 24 / t)
        assert activation_nbytes(s, b, h, a, recompute="selective") / t == 34 * sbh / t
        assert activation_nbytes(s, b, h, a, tp_size=t, recompute="full") == 2 * sbh


@pytest.mark.parametrize(
    ("h", "a", "saves", "costs"), [(12288, 96, "70 %", "2.7 %"), (20480, 128, "65 %", "1.6 %")]
)
def test_selective_recomputation_saves_and_costs_what_the_paper_says(
    h: int, a: int, saves: str, costs: str
) -> None:
    none, selective = (activation_nbytes(2048, 1, h, a, recompute=r) for r in ("none", "selective"))
    assert f"{100 * (1 - selective / none):.0f} %" == saves
    flops = layer_flops(2048, 1, h, "selective")
    assert f"{100 * flops['recompute'] / flops['forward']:.1f} %" == costs


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_are_those_of_the_products_that_run(recompute: str) -> None:
    s, b, h = 16, 2, 24
    config = GPTConfig(block_size=s, num_heads=3, hidden_size=h, dropout=0.1, unfused=True)
    layer = Block(config)
    if recompute == "selective":
        layer.attn.core = partial(checkpoint, layer.attn.core)
    x = torch.ones(b, s, h, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        (checkpoint(layer, x) if recompute == "full" else layer(x)).sum().backward()
    flops = layer_flops(s, b, h, recompute)
    # A recomputation ends before the product with V, whose result nobody needs; after the last
    # product of a layer comes a mask that is needed.
    unneeded = 2 * s * s * b * h if recompute == "selective" else 0
    assert counted.get_total_flops() == sum(flops.values()) - unneeded


def test_unknown_names_and_numbers_are_refused() -> None:
    for optimizer, precision in (("adam8bit", "fp32"), ("adamw", "fp8")):
        with pytest.raises(ValueError, match="momentum"):
            model_state_nbytes(10, optimizer, precision)
    for n, stage in ((4, 4), (0, 1)):
        with pytest.raises(ValueError, match="stage="):
            zero_nbytes(10, n, stage)
    for formula in (activation_nbytes, layer_flops):
        with pytest.raises(ValueError, match="recompute='some'"):
            formula(1, 1, 1, *[1] * (formula is activation_nbytes), recompute="some")
    with pytest.raises(ValueError, match="tp_size=0"):
        activation_nbytes(1, 1, 1, 1, tp_size=0)
