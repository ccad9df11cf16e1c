"""What lesson 01's exercises must do: predict model states, accumulate gradients, count a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_close, expect_int, expect_tensor
from pdt.grade.lean_block import LEAN_BLOCK_NBYTES
from pdt.measure.memory import Ledger
from pdt.measure.saved import saved_activations
from pdt.model import GPT, GPTConfig

KINDS = ("parameters", "gradients", "optimizer states")
MODELS = (
    "two layers",
    "a tied weight",
    "a frozen layer",
    "all frozen",
    "a parameter of shape ()",
    "buffers",
)
STEPPERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


def _hidden_model(what: str, width: int) -> nn.Module:
    """A float32 model of odd sizes."""
    model = nn.Sequential(nn.Linear(width, width + 3), nn.Linear(width + 3, width, bias=False))
    if what == "a tied weight":
        model.append(nn.Linear(width + 3, width, bias=False))
        model[2].weight = model[1].weight
    elif what == "a parameter of shape ()":
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    elif what == "buffers":
        model.append(nn.BatchNorm1d(width))
    elif what != "two layers":
        frozen = model if what == "all frozen" else model[0]
        frozen.requires_grad_(False)
    return model


def _states_trials(dice: Dice) -> Iterator[Trial]:
    for what in MODELS:
        others = (dice.choice(("sgd", "momentum")), dice.choice(("fp32", "mixed")))
        for optimizer, precision in (("adamw", "fp32"), ("adamw", "mixed"), others):
            width = dice.integer(3, 60)
            label = f"{what}, {optimizer}, {precision}"
            yield Trial([(what, width, optimizer, precision)], label)


def _predict(
    learner: Callable[..., Any], what: str, width: int, optimizer: str, precision: str
) -> tuple[Any, bool]:
    """The prediction, and whether the model was left as it was."""
    model = _hidden_model(what, width)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    predicted = learner(model, optimizer, precision)
    after = model.state_dict()
    same = before.keys() == after.keys() and all(
        value.dtype == after[name].dtype and torch.equal(value, after[name])
        for name, value in before.items()
    )
    return predicted, same and all(param.grad is None for param in model.parameters())


@cache
def _counted(what: str, width: int, optimizer: str, precision: str) -> dict[str, int]:
    """What the ledger counts after a real step of such a model."""
    model = _hidden_model(what, width)
    trained = [param for param in model.parameters() if param.requires_grad]
    if precision == "mixed":
        model.bfloat16()
        trained = [nn.Parameter(param.detach().float()) for param in trained]  # master copies
    stepper = STEPPERS[optimizer](trained) if trained else None
    with Ledger(model=model, optimizer=stepper) as ledger:
        for param in [*model.parameters(), *trained]:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        if stepper is not None:
            stepper.step()
        if precision == "mixed":
            for param in trained:
                param.grad = None
    live = ledger.live()
    return {kind: live[kind] for kind in KINDS}


def _predicts(kind: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        predicted = run.ranks[0].result[0]
        if type(predicted) is not dict or sorted(predicted) != sorted(KINDS):
            shown = sorted(map(str, predicted)) if type(predicted) is dict else type(predicted)
            raise Wrong(f"a dict with the keys {', '.join(KINDS)}", shown)
        expect_int(predicted[kind], _counted(*run.inputs[0])[kind], f"bytes of {kind}")

    return check


def _only_looks(run: Run) -> None:
    expect(run.ranks[0].result[1], "the model as it was", "other values, dtypes or gradients")


TRAINING_NBYTES = Exercise(
    name="training_nbytes",
    points=2,
    minutes=15,
    trials=_states_trials,
    drive=_predict,
    poison=("pdt.plan.formulas.model_state_nbytes",),
    properties=(
        Property(
            "predicts the parameters to the byte",
            _predicts("parameters"),
            "model.parameters() gives a tied weight once, and no buffers.",
        ),
        Property(
            "predicts the gradients to the byte",
            _predicts("gradients"),
            "a gradient has its parameter's shape and dtype; a frozen parameter has none.",
        ),
        Property(
            "predicts the optimizer states to the byte",
            _predicts("optimizer states"),
            "count tensors as well as elements: AdamW keeps a step count of 4 bytes for each.",
        ),
        Property(
            "leaves the model as it was",
            _only_looks,
            "a prediction takes no step and casts nothing: numel() is enough.",
        ),
    ),
)

TOKENS, VOCAB = 12, 23


def _small_model() -> GPT:
    config = GPTConfig(VOCAB, TOKENS, num_layers=1, num_heads=2, hidden_size=16)
    return GPT(config, seed=3).double()


def _batches(dice: Dice) -> Iterator[Trial]:
    """Targets of -100 do not count, so rows weigh differently; one row counts nothing at all."""
    rows = dice.integer(3, 4) * 2 + 1
    for num_microbatches in (1, 2, 3, rows):
        tokens = dice.integers((rows, TOKENS), torch.int64, VOCAB // 2) + VOCAB // 2
        targets = tokens.roll(-1, dims=1)
        for row in range(rows):
            targets[row, dice.integer(1, TOKENS) if row else 1 :] = -100
        targets[rows // 2] = -100
        label = f"{rows} rows, num_microbatches={num_microbatches}"
        yield Trial([(tokens, targets, num_microbatches)], label)


def _train(
    train_step: Callable[..., Any], tokens: Tensor, targets: Tensor, num_microbatches: int
) -> tuple[list[Any], list[Tensor], int]:
    """Two steps: their results, the parameters after them, the most bytes of activations."""
    model = _small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with Ledger(model=model, optimizer=optimizer) as ledger:
        results = [
            train_step(model, optimizer, (tokens, targets), num_microbatches) for _ in range(2)
        ]
    most = max(live["activations"] for _, live in ledger.timeline)
    return results, list(model.parameters()), most


def _whole_batch(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], num_microbatches: int
) -> float:
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def _returns_the_loss(run: Run) -> None:
    wanted, _, _ = _train(_whole_batch, *run.inputs[0])
    for step, (seen, loss) in enumerate(zip(run.ranks[0].result[0], wanted, strict=True), 1):
        expect_close(seen, loss, 1e-9, f"the loss of step {step}")


def _updates_alike(run: Run) -> None:
    _, wanted, _ = _train(_whole_batch, *run.inputs[0])
    names = [name for name, _ in _small_model().named_parameters()]
    for name, seen, param in zip(names, run.ranks[0].result[1], wanted, strict=True):
        what = f"{name} after two steps"
        expect_tensor(seen, param.detach(), what, rtol=1e-9, atol=1e-12)  # sums in another order


def _keeps_one(run: Run) -> None:
    tokens, targets, num_microbatches = run.inputs[0]
    rows = -(-len(tokens) // num_microbatches)
    kept = saved_activations(_small_model(), tokens[:rows], targets[:rows])
    one, seen = sum(tensor.nbytes for tensor in kept), run.ranks[0].result[2]
    wanted = f"{one:,} bytes of activations at most, those of {rows} rows"
    expect(seen <= 1.2 * one, wanted, f"{seen:,} bytes")


TRAIN_STEP = Exercise(
    name="train_step",
    points=3,
    minutes=25,
    trials=_batches,
    drive=_train,
    properties=(
        Property(
            "returns the loss of the whole batch",
            _returns_the_loss,
            "the mean over all targets that count, as a float: sum up each micro-batch's part.",
        ),
        Property(
            "updates the model as the whole batch would",
            _updates_alike,
            "weigh each micro-batch by its share of the targets that count; one zero_grad before "
            "all of them, one step after.",
        ),
        Property(
            "keeps the activations of one micro-batch",
            _keeps_one,
            "call backward() on each micro-batch before the forward of the next.",
        ),
    ),
)


EXERCISES = (TRAINING_NBYTES, TRAIN_STEP, LEAN_BLOCK_NBYTES)
