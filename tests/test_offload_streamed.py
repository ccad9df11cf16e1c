"""A linear layer whose weight stays on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdt.comm import Link
from pdt.measure import Ledger
from pdt.offload import Bus, HostAdamW, StreamedLinear


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5)])
def test_equals_a_linear_layer(num_tiles: int, bias: bool, shape: tuple[int, ...]) -> None:
    with Bus() as bus:
        streamed = StreamedLinear(5, 7, bias, bus=bus, num_tiles=num_tiles, dtype=torch.float64)
        plain = nn.Linear(5, 7, bias, dtype=torch.float64)
        plain.load_state_dict(streamed.state_dict())
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        for _ in range(2):  # the second backward adds
            out, expected = streamed(x), plain(y)
            torch.testing.assert_close(out, expected)
            weights = torch.randn_like(out)
            (out * weights).sum().backward()
            (expected * weights).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        for mine, theirs in zip(streamed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_weight_is_carried_twice_and_its_gradient_once() -> None:
    with Bus() as bus:
        layer = StreamedLinear(64, 256, bus=bus, num_tiles=4)
        nbytes = layer.weight.nbytes
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
        assert bus.nbytes("to device") == 2 * nbytes
        assert bus.nbytes("to host") == nbytes
        bus.clear()
        layer(torch.randn(3, 64)).sum().backward()  # nobody wants the input's gradient
        assert bus.nbytes("to device") == nbytes
        layer.weight.requires_grad_(False)
        bus.clear()
        with torch.no_grad():
            layer(torch.randn(3, 64))
        assert (bus.nbytes("to device"), bus.nbytes("to host")) == (nbytes, 0)


@pytest.mark.parametrize("num_tiles", [1, 2, 4, 16])
def test_the_device_holds_two_tiles(num_tiles: int) -> None:
    with Bus(Link(1e-4, 1e9)) as bus:
        layer = StreamedLinear(256, 512, bias=False, bus=bus, num_tiles=num_tiles)
        with Ledger(layer) as ledger:
            with torch.no_grad():
                layer(torch.ones(1, 256))
        here = ledger.peak()["other"]  # all but the weight
        tile = layer.weight.nbytes // num_tiles
        small = 4 * (256 + 2 * 512 + 512)  # in, out and one product
        assert min(2, num_tiles) * tile <= here <= min(2, num_tiles) * tile + small


def test_the_next_tile_travels_while_one_is_computed_with() -> None:
    tile_s = 50e-3
    with Bus(Link(0.0, 64 * 64 * 4 / tile_s)) as bus:
        layer = StreamedLinear(64, 256, bias=False, bus=bus, num_tiles=4)
        under_way = []
        for _ in layer.tiles():
            under_way.append(sum(not t.is_completed() for t in bus.transfers))
    assert under_way == [1, 1, 1, 0]


def test_a_host_optimizer_steps_it() -> None:
    with Bus() as bus:
        layer = StreamedLinear(8, 8, bus=bus, num_tiles=3)
        plain = nn.Linear(8, 8)
        plain.load_state_dict(layer.state_dict())
        mine, theirs = HostAdamW(layer.parameters()), torch.optim.AdamW(plain.parameters())
        x = torch.randn(5, 8)
        for model, optimizer in ((layer, mine), (plain, theirs)):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(layer.weight, plain.weight)
        torch.testing.assert_close(layer.bias, plain.bias)


def test_what_does_not_fit_is_refused() -> None:
    with Bus() as bus:
        with pytest.raises(ValueError, match="num_tiles=9 is not from 1 to out_features=8"):
            StreamedLinear(4, 8, bus=bus, num_tiles=9)
        layer = StreamedLinear(4, 8, bus=bus)
        with pytest.raises(ValueError, match=r"\(\.\.\., 4\) on cpu is wanted, got \(2, 5\)"):
            layer(torch.ones(2, 5))
        out = layer(torch.ones(2, 4, requires_grad=True))
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="weight of a StreamedLinear has changed"):
            out.sum().backward()
