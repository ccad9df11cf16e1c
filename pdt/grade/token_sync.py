"""What lesson 04's token-weighted exchange must do: one mean over all tokens of the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_close, expect_tensor

IGNORED = -100
VOCAB, WIDTH = 11, 4
MOST_CALLS = 3  # the count, the gradients, the loss


def build(weights: list[Tensor]) -> nn.Module:
    """A model that looks at one token at a time: logits (B, T, V) for tokens (B, T)."""
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)).double()
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    return model


def _micro_batch(dice: Dice, count: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) and as many targets, of which `count` are not ignored."""
    shape = (dice.integer(2, 4), dice.integer(5, 8))
    tokens, targets = (dice.integers(shape, torch.int64).abs() for _ in range(2))
    targets.view(-1)[count:] = IGNORED
    return tokens, targets


def _trials(dice: Dice) -> Iterator[Trial]:
    """Two micro-batches each; another number on each rank; a rank with nothing that counts."""
    for n in (1, 2, 3, 4):
        few = [[1, 9 + r] if r % 2 else [1, 0] for r in range(n)]
        other = [[dice.integer(1, 9) for _ in range(1 + (r + n) % 3)] for r in range(n)]
        none = [[3, 7], [0, 0], [], [1, 10]][:n]
        for label, counts in (
            ("two micro-batches on each rank", few),
            ("another number of micro-batches on each rank", [*other[:-1], [2, 5, 9, 1]]),
            ("ranks without any token", none),
        ):
            shapes = [(VOCAB, WIDTH), (VOCAB, WIDTH), (VOCAB,)]
            weights = [dice.normal(shape, torch.float64) for shape in shapes]
            batches = [[_micro_batch(dice, count) for count in own] for own in counts]
            yield Trial([(weights, own) for own in batches], label)


def _drive(token_sync: Callable[..., Any], weights: list[Tensor], batches: list) -> Any:
    """What it returned, and the gradients."""
    model = build(weights)
    loss = token_sync(model, [(tokens.clone(), targets.clone()) for tokens, targets in batches])
    loss = loss.detach().item() if type(loss) is torch.Tensor and loss.numel() == 1 else loss
    return loss, [p.grad for p in model.parameters()]


def _truth(run: Run) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process that has all micro-batches of all ranks."""
    every = [batch for _, batches in run.inputs for batch in batches]
    tokens = torch.cat([tokens.flatten() for tokens, _ in every])
    targets = torch.cat([targets.flatten() for _, targets in every])
    model = build(run.inputs[0][0])
    loss = F.cross_entropy(model(tokens), targets, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def _right_loss(run: Run) -> None:
    loss, _ = _truth(run)
    for rank, seen in enumerate(run.ranks):
        expect_close(seen.result[0], loss, 1e-9, f"rank {rank}'s loss")


def _right_gradient(run: Run) -> None:
    _, grads = _truth(run)
    for rank, seen in enumerate(run.ranks):
        for i, (grad, wanted) in enumerate(zip(seen.result[1], grads, strict=True)):
            what = f"the gradient of parameter {i} on rank {rank}"
            if grad is None:
                raise Wrong(f"{what} is a tensor", "None")
            expect_tensor(grad, wanted, what, rtol=1e-9, atol=1e-12)


def _few_calls(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        calls = len(seen.records)
        expect(calls <= MOST_CALLS, f"at most {MOST_CALLS} calls on rank {rank}", f"{calls} calls")


TOKEN_SYNC = Exercise(
    name="token_sync",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=("pdt.ddp.tokens.token_scale", "pdt.ddp.tokens.token_mean"),
    properties=(
        Property(
            "returns the mean loss over all tokens of all ranks",
            _right_loss,
            "add up the sums of losses of all ranks and divide by the tokens of all ranks; "
            "a mean of means counts tokens unequally.",
        ),
        Property(
            "leaves that loss's gradient on every rank",
            _right_gradient,
            "run backward on loss_sum / all_tokens for each micro-batch, then add the gradients "
            "up over the ranks: no more division; a rank without tokens adds zeros.",
        ),
        Property(
            "communicates once for the whole window",
            _few_calls,
            "count all targets before the first backward, and exchange gradients after the last.",
        ),
    ),
)
