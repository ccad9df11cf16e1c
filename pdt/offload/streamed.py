"""A layer larger than the device's memory: its weight visits the device in tiles.

Rajbhandari et al. 2021 (arXiv:2104.07857), section 5.1.3, memory-centric tiling, and the overlap of
section 6.2: while one tile is computed with, the next one is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pdt.offload.bus import Bus, Transfer


class StreamedLinear(nn.Module):
    """`nn.Linear` whose weight and bias stay on the host; of the weight the device holds two tiles.

    `weight` (out_features, in_features) and `bias` (out_features,) are parameters in the host's
    memory, and so are their gradients: an optimizer on the host, `HostAdamW`, steps them. A tile is
    `ceil(out_features / num_tiles)` rows. The input (..., in_features) is on `device` and so is the
    output (..., out_features). Forward carries the weight over the bus once; backward carries it
    once more, and its gradient back.

    Raises ValueError for fewer than one tile or more tiles than rows, and for an input elsewhere.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bus: Bus,
        num_tiles: int = 4,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_tiles <= out_features:
            raise ValueError(f"num_tiles={num_tiles} is not from 1 to out_features={out_features}")
        self.in_features, self.out_features, self.num_tiles = in_features, out_features, num_tiles
        self.bus, self.device = bus, torch.device(device)
        made = nn.Linear(in_features, out_features, bias, dtype=dtype)
        host = bus.empty(made.weight.numel(), made.weight.dtype).view_as(made.weight)
        self.weight = nn.Parameter(host.copy_(made.weight.detach()))
        self.bias = made.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != self.device.type or x.shape[-1] != self.in_features:
            raise ValueError(
                f"an input (..., {self.in_features}) on {self.device} is wanted, got "
                f"{tuple(x.shape)} on {x.device}"
            )
        return _Streamed.apply(x, self.weight, self.bias, self)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, num_tiles={self.num_tiles}"

    def rows(self) -> list[slice]:
        """The rows of each tile."""
        step = math.ceil(self.out_features / self.num_tiles)
        return [
            slice(i, min(i + step, self.out_features)) for i in range(0, self.out_features, step)
        ]

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Each tile's rows and values on the device, valid until the next one is asked for.

        The next tile is under way meanwhile, in the other of two buffers.
        """
        rows, weight = self.rows(), self.weight.detach()
        shape = (rows[0].stop, self.in_features)
        buffers = [torch.empty(shape, dtype=weight.dtype, device=self.device) for _ in rows[:2]]

        def start(k: int) -> tuple[Tensor, Transfer]:
            tile = buffers[k % 2][: rows[k].stop - rows[k].start]
            return tile, self.bus.to_device([(weight[rows[k]], tile)], "weight")

        coming = start(0)
        for k in range(len(rows)):
            tile, transfer = coming
            transfer.wait()
            if k + 1 < len(rows):
                coming = start(k + 1)
            yield rows[k], tile


class _Streamed(torch.autograd.Function):
    """The product of each tile where it belongs; the gradient of each goes home as it is made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: StreamedLinear
    ) -> Tensor:
        ctx.layer, ctx.version = layer, weight._version
        ctx.save_for_backward(x)
        output = x.new_empty(*x.shape[:-1], layer.out_features)
        for rows, tile in layer.tiles():
            output[..., rows] = x @ tile.t()
        if bias is not None:
            output += bias.detach().to(x.device)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        if layer.weight._version != ctx.version:
            raise RuntimeError("the weight of a StreamedLinear has changed since its forward")
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        flat_x, flat_grad = x.reshape(-1, layer.in_features), grad.reshape(-1, layer.out_features)
        grad_x = torch.zeros_like(flat_x) if wants_x else None
        home = _Home(layer) if wants_weight else None
        for rows, tile in layer.tiles() if wants_x else ((rows, None) for rows in layer.rows()):
            if grad_x is not None and tile is not None:
                grad_x.addmm_(flat_grad[:, rows], tile)
            if home is not None:
                home.send(rows, flat_grad[:, rows].t() @ flat_x)
        grad_bias = flat_grad.sum(0).to(layer.bias.device) if wants_bias else None
        return (
            None if grad_x is None else grad_x.view_as(x),
            None if home is None else home.arrived(),
            grad_bias,
            None,
        )


class _Home:
    """The weight's gradient on the host, and at most two tiles of it under way."""

    def __init__(self, layer: StreamedLinear) -> None:
        self._bus, weight = layer.bus, layer.weight
        self._grad = self._bus.empty(weight.numel(), weight.dtype).view_as(weight)
        self._under_way: list[Transfer] = []

    def send(self, rows: slice, tile: Tensor) -> None:
        if len(self._under_way) == 2:
            self._under_way.pop(0).finish()
        self._under_way.append(self._bus.to_host([(tile, self._grad[rows])], "gradients"))

    def arrived(self) -> Tensor:
        for transfer in self._under_way:
            transfer.finish()
        return self._grad
