"""Masters and states in files: the same training, and no more memory than the window."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pdt.offload import Bus, OffloadedAdamW, OffloadedOptimizer
from pdt.offload.files import TensorFiles
from tests.test_offload_optimizer import SETTINGS, Cruel, assert_same, tokens, train, twins


@pytest.fixture
def bus() -> Iterator[Bus]:
    with Bus() as made:
        yield made


@pytest.fixture
def files(tmp_path: Path) -> Iterator[TensorFiles]:
    with TensorFiles(tmp_path) as made:
        yield made


def both(bus: Bus, files: TensorFiles, **more: Any) -> Any:
    """A model stepped from files and one stepped in memory."""
    first, second = twins()
    settings = {"bus": bus, "transfer_cap_mb": 1e-4, **SETTINGS, **more}
    filed = OffloadedAdamW(first.parameters(), files=files, **settings)
    return first, filed, second, OffloadedAdamW(second.parameters(), **settings)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("delay_after", [None, 1])
def test_trains_bitwise_as_in_memory(
    bus: Bus, files: TensorFiles, parts: int, delay_after: int | None
) -> None:
    first, filed, second, held = both(bus, files, delay_after=delay_after)
    for model, optimizer in ((first, filed), (second, held)):
        train(model, optimizer, range(4), parts)
        optimizer.synchronize()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, False])
def test_torchs_adamw_and_low_precision_step_from_files(
    bus: Bus, files: TensorFiles, dtype: torch.dtype, fused: bool
) -> None:
    models = [nn.Linear(40, 50).to(dtype), nn.Linear(40, 50).to(dtype)]
    models[1].load_state_dict(models[0].state_dict())
    for model, where in zip(models, (files, None), strict=True):
        optimizer = OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, bus=bus, files=where, lr=0.01, fused=fused
        )
        for _ in range(3):
            model(torch.ones(2, 40, dtype=dtype)).float().square().sum().backward()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].bias, models[1].bias)


def test_memory_holds_the_window_and_the_gradients(bus: Bus, files: TensorFiles) -> None:
    numel, layers = 64 * 64, 12
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)]).bfloat16()
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, files=files, transfer_cap_mb=0.0)
    for _ in range(3):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in optimizer.host_tensors}
        nbytes = sum(storage.nbytes() for storage in held.values())
        window = 3 * 12 * numel  # masters and two states of three buckets
        returning, steps = 3 * 2 * numel, 4 * layers
        assert nbytes <= layers * 2 * numel + window + returning + steps + 3 * 4096
    assert optimizer.window is not None
    assert optimizer.window.peak_live <= 3
    files.clear()
    model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.window.drain()
    assert files.nbytes("read") == files.nbytes("write") == layers * 12 * numel


def test_states_are_read_for_a_state_dict_and_load_from_one(bus: Bus, files: TensorFiles) -> None:
    first, filed, second, held = both(bus, files)
    train(first, filed, range(3))
    train(second, held, range(3))
    mine, theirs = filed.state_dict(), held.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        assert state.keys() == theirs["state"][key].keys()
        assert all(torch.equal(state[name], theirs["state"][key][name]) for name in state)

    again, other = Cruel(), Cruel()
    for model, source, where in ((again, theirs, files), (other, mine, None)):
        model.load_state_dict(second.state_dict())
        optimizer = OffloadedAdamW(model.parameters(), bus=bus, files=where, **SETTINGS)
        optimizer.load_state_dict(copy.deepcopy(source))
        train(model, optimizer, range(3, 6))
    train(first, filed, range(3, 6))
    assert_same(again, first)
    assert_same(other, first)


def test_parameters_written_on_the_device_reach_the_file(bus: Bus, files: TensorFiles) -> None:
    first, filed, second, held = both(bus, files)
    for model, optimizer in ((first, filed), (second, held)):
        train(model, optimizer, range(2))
        with torch.no_grad():
            model.hidden.weight.mul_(0.5)
        train(model, optimizer, range(2, 4))
    assert_same(first, second)


def test_late_groups_go_on_from_files(bus: Bus, files: TensorFiles) -> None:
    models = twins()
    for model, where in zip(models, (files, None), strict=True):
        optimizer = OffloadedAdamW([model.embedding.weight], bus=bus, files=where, **SETTINGS)
        for step in range(4):
            model(tokens(step)).backward()
            optimizer.step()
            model.zero_grad()
            if step == 1:
                optimizer.add_param_group({"params": [model.scale, model.hidden.weight]})
    assert len(files.names()) == 2  # of the buckets that there are
    assert_same(*models)


def test_optimizers_whose_states_do_not_begin_at_zero_are_refused(
    bus: Bus, files: TensorFiles
) -> None:
    with pytest.raises(ValueError, match="not for Adagrad"):
        OffloadedOptimizer(
            nn.Linear(2, 2).parameters(), torch.optim.Adagrad, bus=bus, files=files, lr=0.1
        )
