"""What lesson 00's exercises must do: pass a token, mend a hang, predict a program's traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Seen, Trial, Wrong
from pdt.grade.expect import (
    expect,
    expect_close,
    expect_int,
    expect_ops,
    expect_tensor,
    expect_unchanged,
    expect_waited,
    traffic,
)

WORLD_SIZES = (1, 2, 3, 4)


def _calls(seen: Seen, op: str) -> int:
    return sum(record.op == op for record in seen.records)


def _token_trials(dice: Dice) -> Iterator[Trial]:
    for n in WORLD_SIZES:
        for shape in ((), (dice.integer(2, 9), 3)):
            inputs = [(dice.integers(shape, torch.int64),) for _ in range(n)]
            yield Trial(inputs, f"shape {shape}")


def _token_is_right(run: Run) -> None:
    token = run.inputs[0][0]
    for rank, seen in enumerate(run.ranks):
        before = rank or run.world_size  # how many ranks have added their number
        expected = token + before * (before + 1) // 2
        expect_tensor(seen.result, expected, f"rank {rank}'s result")


def _token_goes_round(run: Run) -> None:
    """One message to the next rank, none when there is no other rank."""
    n = run.world_size
    for rank, seen in enumerate(run.ranks):
        sent = [record.peer for record in seen.records if record.op == "send"]
        wanted = [(rank + 1) % n] if n > 1 else []
        expect(sent == wanted, f"rank {rank} sends to {wanted}", f"it sends to {sent}")
        received = _calls(seen, "recv")
        expect(received == len(wanted), f"rank {rank} receives {len(wanted)}", received)


PASS_TOKEN = Exercise(
    name="pass_token",
    points=2,
    minutes=10,
    trials=_token_trials,
    properties=(
        Property(
            "uses only send and recv",
            lambda run: expect_ops(run, "send", "recv"),
            "build it from dist.send and dist.recv: no collective is needed.",
        ),
        Property(
            "returns what each rank received",
            _token_is_right,
            "rank r adds r + 1 to the token that it sends on, and returns the one that it got.",
        ),
        Property(
            "sends one message from each rank to the next",
            _token_goes_round,
            "to (rank + 1) % world_size, and none at all when the world is one rank.",
            picture=traffic,
        ),
        Property(
            "leaves its argument as it was",
            lambda run: expect_unchanged(run, 0),
            "make a new tensor to receive into, and add by `+`, not by `+=`.",
        ),
        Property(
            "leaves no message in flight",
            expect_waited,
            "wait() for the work of every isend and irecv before you return.",
        ),
    ),
)


def _mean_trials(dice: Dice) -> Iterator[Trial]:
    """As many losses on each rank, different numbers, none on one rank, none at all."""
    for n in WORLD_SIZES:
        alike = dice.integer(2, 5)
        for label, counts in (
            ("as many batches on each rank", [alike] * n),
            ("another number of batches on each rank", [2 * r + 1 for r in range(n)]),
            ("one rank without a batch", [3 * (r != n - 1) for r in range(n)]),
            ("no batch at all", [0] * n),
        ):
            yield Trial([(dice.integers((count,), torch.float64),) for count in counts], label)


def _mean_is_right(run: Run) -> None:
    losses = torch.cat([args[0] for args in run.inputs])
    expected = losses.mean().item() if losses.numel() else 0.0
    for rank, seen in enumerate(run.ranks):
        what = f"rank {rank}'s mean"
        if expected:
            expect_close(seen.result, expected, 1e-6, what)
        else:
            expect(seen.result == 0 and type(seen.result) is float, f"{what} is 0.0", seen.result)


def _one_small_all_reduce(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        what = ", ".join(record.label for record in seen.records) or "no call"
        alone = run.world_size == 1 and not seen.records
        one = [record.op for record in seen.records] == ["all_reduce"]
        expect(alone or one, f"one all_reduce on rank {rank}", what)
        nbytes = sum(record.nbytes for record in seen.records)
        expect(nbytes <= 16, f"16 bytes at most on rank {rank}", f"{nbytes} bytes")


MEAN_LOSS = Exercise(
    name="mean_loss",
    points=2,
    minutes=10,
    trials=_mean_trials,
    properties=(
        Property(
            "is the mean of all losses of all ranks",
            _mean_is_right,
            "add the sums and the counts of all ranks, then divide; 0.0 when there is no loss.",
        ),
        Property(
            "makes one all_reduce of 16 bytes",
            _one_small_all_reduce,
            "put this rank's sum and its count in one tensor of two numbers, and reduce that.",
        ),
        Property(
            "leaves its argument as it was",
            lambda run: expect_unchanged(run, 0),
            "all_reduce works in place: give it a tensor of your own.",
        ),
    ),
)

OPS = ("broadcast", "all_reduce", "send", "recv")


def chatter(numel: int) -> None:
    """The program whose calls and bytes are to be predicted."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(numel)  # float32
    dist.broadcast(x, src=0)
    for _ in range(3):
        dist.all_reduce(x)
    part = x[: numel // 2].to(torch.bfloat16)
    if rank > 0:
        dist.send(part, dst=0)
    else:
        for peer in range(1, world_size):
            dist.recv(part, src=peer)


def _traffic_trials(dice: Dice) -> Iterator[Trial]:
    for n in WORLD_SIZES:
        numel = 2 * dice.integer(10, 500) + 1
        yield Trial([(rank, n, numel) for rank in range(n)], f"numel={numel}")


def _predict_then_run(
    traffic: Callable[[int, int, int], Any], rank: int, world_size: int, numel: int
) -> Any:
    predicted = traffic(rank, world_size, numel)
    chatter(numel)
    return predicted


def _compare(run: Run, position: int, what: str) -> None:
    """Compare one number of each (calls, nbytes) with what the meter counted on that rank."""
    for rank, seen in enumerate(run.ranks):
        for op in OPS:
            records = [record for record in seen.records if record.op == op]
            counted = (len(records), sum(record.nbytes for record in records))
            name = f"{what} of {op} on rank {rank}"
            expect_int(_entry(seen.result, op)[position], counted[position], name)


def _entry(predicted: Any, op: str) -> tuple:
    if type(predicted) is not dict or sorted(predicted) != sorted(OPS):
        shown = sorted(map(str, predicted)) if type(predicted) is dict else type(predicted).__name__
        raise Wrong(f"a dict with the keys {', '.join(OPS)}", shown)
    entry = predicted[op]
    if type(entry) is not tuple or len(entry) != 2:
        raise Wrong(f"{op!r} has a tuple (calls, nbytes)", repr(entry)[:40])
    return entry


def _is_not_run(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        calls = len(seen.records)
        wanted = 4 + (1 if rank > 0 else run.world_size - 1)  # those of chatter itself
        expect(calls == wanted, f"no call on rank {rank} but chatter's {wanted}", f"{calls} calls")


TRAFFIC = Exercise(
    name="traffic",
    points=2,
    minutes=15,
    trials=_traffic_trials,
    drive=_predict_then_run,
    properties=(
        Property(
            "predicts the number of calls on each rank",
            lambda run: _compare(run, 0, "number of calls"),
            "walk through chatter as that rank does; an operation not called has (0, 0).",
        ),
        Property(
            "predicts the bytes of each operation",
            lambda run: _compare(run, 1, "nbytes"),
            "a float32 takes 4 bytes, a bfloat16 takes 2; sum over the calls.",
        ),
        Property(
            "predicts without running it",
            _is_not_run,
            "compute the numbers from rank, world_size and numel alone.",
        ),
    ),
)

EXERCISES = (PASS_TOKEN, MEAN_LOSS, TRAFFIC)
