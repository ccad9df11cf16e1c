"""Lesson 12's exercise on offload: views keep their data, parameters stay, nothing goes twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.measure.memory import Ledger
from pdt.measure.saved import saved_activations
from pdt.offload.bus import Bus, Pair, Transfer

SLACK_NBYTES = 4096
KINDS = ("a matrix and its transpose", "slices of one product", "a network", "masks and numbers")


class WatchedBus(Bus):
    """Knows what it has carried: the storages that left, and the host's tensors."""

    def __init__(self) -> None:
        super().__init__(None)
        self.left: list[int] = []
        self._hosts: list[weakref.ref[Tensor]] = []

    def to_host(self, pairs: Sequence[Pair], name: str = "activations") -> Transfer:
        self.left += [source.untyped_storage().data_ptr() for source, _ in pairs]
        self._hosts += [weakref.ref(target) for _, target in pairs]
        return super().to_host(pairs, name)

    @property
    def host_tensors(self) -> list[Tensor]:
        """Those that are still there."""
        return [tensor for ref in self._hosts if (tensor := ref()) is not None]


class Network(nn.Module):
    """Saves views of its parameters, and one storage several times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden * self.scale) * hidden @ self.first.weight.t()[:, 1:]


def _trials(dice: Dice) -> Iterator[Trial]:
    for kind in KINDS:
        for _ in range(2):
            width = dice.integer(48, 64)
            yield Trial([(kind, width, dice.integer(1, 10**6))], kind)


def _case(kind: str, width: int, seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor, nn.Module]:
    """A function of a square x, so that no shape betrays a wrong view; x; and its parameters."""
    torch.manual_seed(seed)
    network = Network(width).double()
    x = torch.randn(width, width, dtype=torch.float64, requires_grad=True)
    functions: tuple[Callable[[Tensor], Tensor], ...] = (_transposed, _slices, network, _masks)
    fn = functions[KINDS.index(kind)]
    return fn, x, network if fn is network else nn.Identity()


def _transposed(x: Tensor) -> Tensor:
    hidden = x.sin()
    return (hidden @ hidden.t()).cos() * hidden.exp()


def _slices(x: Tensor) -> Tensor:
    third = len(x) // 3
    q, k, v = x.exp().tanh()[: 3 * third].view(3, third, -1).unbind(0)
    return (q @ k.t()).softmax(-1) @ v * v[:, ::2].sum(1, keepdim=True)


def _masks(x: Tensor) -> Tensor:
    order = torch.arange(len(x)).flip(0)
    chosen = torch.where(x > 0, x.sin(), x * x.mean())
    return chosen[order].half().double().cos() * chosen.t()


def _drive(offload_hooks: Callable[..., Any], kind: str, width: int, seed: int) -> dict[str, Any]:
    fn, x, network = _case(kind, width, seed)
    bus = WatchedBus()
    with bus, Ledger(network, bus) as ledger:
        x * 1  # so that the ledger knows x
        before = sum(ledger.live("device").values())
        with saved_tensors_hooks(*offload_hooks(bus)):
            y = fn(x)
        held = sum(ledger.live("device").values()) - before - y.nbytes
        y.square().sum().backward()
    params = list(network.parameters())
    return {
        "grads": [leaf.grad for leaf in (x, *params)],
        "held": held,
        "left": sum(tensor.nbytes for tensor in bus.host_tensors),
        "carried": {way: bus.nbytes(way) for way in ("to host", "to device")},
        "parameters": sum(p.untyped_storage().data_ptr() in bus.left for p in params),
    }


@cache
def _plain(kind: str, width: int, seed: int) -> tuple[list[Tensor | None], int]:
    """The gradients, and the bytes that the graph keeps, each storage once."""
    fn, x, network = _case(kind, width, seed)
    kept = sum(tensor.nbytes for tensor in saved_activations(fn, x, model=network))
    fn(x).square().sum().backward()
    return [leaf.grad for leaf in (x, *network.parameters())], kept


def _same_gradients(run: Run) -> None:
    wanted, _ = _plain(*run.inputs[0])
    for i, (grad, right) in enumerate(zip(run.ranks[0].result["grads"], wanted, strict=True)):
        assert right is not None
        expect_tensor(grad, right, f"the gradient of {'x' if i == 0 else f'parameter {i - 1}'}")


def _parameters_stay(run: Run) -> None:
    count = run.ranks[0].result["parameters"]
    expect(count == 0, "no parameter on the bus", f"{count}")


def _once(run: Run) -> None:
    seen = run.ranks[0].result
    _, kept = _plain(*run.inputs[0])
    if seen["parameters"]:
        return  # told already, and it spoils the sum
    for way, nbytes in seen["carried"].items():
        expect(nbytes == kept, f"{kept:,} bytes {way}: each storage once", f"{nbytes:,}")


def _frees(run: Run) -> None:
    seen = run.ranks[0].result
    held, left = seen["held"], seen["left"]
    expect(held <= SLACK_NBYTES, "none of it on the device after forward", f"{held:,} bytes")
    expect(left == 0, "nothing on the host after backward", f"{left:,} bytes")


OFFLOAD_HOOKS = Exercise(
    name="offload_hooks",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=(
        "pdt.offload.activations.offload_activations",
        "pdt.offload.activations.ActivationOffload",
        "torch.autograd.graph.save_on_cpu",
    ),
    properties=(
        Property(
            "gives the same gradients, to the bit",
            _same_gradients,
            "a view is a storage, a dtype, an offset, a shape and strides: keep all five.",
        ),
        Property(
            "lets parameters and their views stay",
            _parameters_stay,
            "isinstance(tensor, nn.Parameter), or tensor._base is one: return it as it is.",
        ),
        Property(
            "carries each storage once each way",
            _once,
            "keep a HostCopy for each storage, and ask it whether it is of this one.",
        ),
        Property(
            "frees the device, and in the end the host",
            _frees,
            "what pack returns may hold the HostCopy, and nothing of the device; a table of them "
            "that holds them strongly lives as long as the hooks.",
        ),
    ),
)
