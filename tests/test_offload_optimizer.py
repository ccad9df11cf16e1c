"""States on the host: the same training as the plain optimizer's, and what the bus carries."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pdt.comm import Link
from pdt.measure import Ledger
from pdt.offload import Bus, HostAdamW, OffloadedAdamW, OffloadedOptimizer
from pdt.offload.bus import Transfer

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def bus() -> Iterator[Bus]:
    with Bus() as made:
        yield made


class Cruel(nn.Module):
    """Frozen, tied, unused, empty, 0-dim and transposed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(5, 3, bias=False)
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens)) * self.scale
        x = self.hidden(x) @ self.transposed + self.empty.sum()
        return self.out(x).square().mean()


def twins(make: Callable[[], nn.Module] = Cruel, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    first = make().to(dtype)
    torch.manual_seed(0)
    return first, make().to(dtype)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, parts: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            model(tokens(10 * step + part)).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("transfer_cap_mb", [0.0, 1e-4, 8.0])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("during_backward", [True, False])
def test_trains_as_the_plain_optimizer(
    bus: Bus, transfer_cap_mb: float, parts: int, during_backward: bool
) -> None:
    model, plain = twins()
    mine = OffloadedOptimizer(
        model.parameters(),
        partial(torch.optim.AdamW, foreach=False),  # type: ignore[arg-type]
        bus=bus,
        transfer_cap_mb=transfer_cap_mb,
        during_backward=during_backward,
        **SETTINGS,
    )
    train(model, mine, range(4), parts)
    train(plain, torch.optim.AdamW(plain.parameters(), foreach=False, **SETTINGS), range(4), parts)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    assert torch.equal(model.unused, torch.ones(3))  # no gradient: no decay either
    assert model.out.weight is model.embedding.weight


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (HostAdamW, SETTINGS),
        (torch.optim.AdamW, {**SETTINGS, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_any_elementwise_optimizer_steps_on_the_host(
    bus: Bus, optimizer_class: Any, settings: dict[str, Any]
) -> None:
    model, plain = twins(dtype=torch.float64 if optimizer_class is not HostAdamW else torch.float32)
    train(
        model,
        OffloadedOptimizer(model.parameters(), optimizer_class, bus=bus, **settings),
        range(5),
    )
    reference = torch.optim.AdamW if optimizer_class is HostAdamW else optimizer_class
    settings = {k: v for k, v in settings.items() if k != "fused"}
    train(plain, reference(plain.parameters(), foreach=False, **settings), range(5))
    assert_same(model, plain)


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)]).to(dtype)


def backward(model: nn.Module, rows: int = 8) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(rows, 32, dtype=dtype)).float().square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_carries_each_gradient_up_and_each_parameter_down(
    bus: Bus, dtype: torch.dtype
) -> None:
    model = linear(dtype)
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, transfer_cap_mb=0.0, **SETTINGS)
    nbytes = sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        bus.clear()
        backward(model)
        assert bus.calls("to host") == 4  # all have left during backward
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert bus.nbytes("to host") == bus.nbytes("to device") == nbytes


def test_low_precision_parameters_are_the_rounded_masters(bus: Bus) -> None:
    model, reference = linear(torch.bfloat16), linear(torch.bfloat16).float()
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, lr=1e-4)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-4, foreach=False)
    for _ in range(20):
        optimizer.zero_grad()
        backward(model)
        grads = [grad.clone() for grad in optimizer.grads()]  # from the last layer to the first
        optimizer.step()
        for param, grad in zip(reversed(list(reference.parameters())), grads, strict=True):
            param.grad = grad.float()
        plain.step()
    for param, exact in zip(model.parameters(), reference.parameters(), strict=True):
        master = optimizer.state[param]["master_param"]
        torch.testing.assert_close(master, exact.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(param, master.bfloat16())
        assert not torch.equal(master, master.bfloat16().float())  # it knows more than it shows


def test_gradients_of_two_transfers_at_most_stay_on_the_device() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    nbytes = 256 * 256 * 4
    with Bus(Link(0.0, nbytes / 5e-3)) as slow:  # 5 ms each, longer than a layer's backward
        optimizer = OffloadedAdamW(model.parameters(), bus=slow, transfer_cap_mb=0.0)
        with Ledger(model, optimizer) as ledger:
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
        peak = max(live["gradients"] for _, live in ledger.history("device"))
    assert 2 * nbytes <= peak <= 3 * nbytes + 4096  # and the one that is being made


def test_a_late_update_uses_the_gradients_of_the_step_before(bus: Bus) -> None:
    model, reference = twins()
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, delay_after=2, **SETTINGS)
    plain = torch.optim.AdamW(reference.parameters(), foreach=False, **SETTINGS)
    late: list[torch.Tensor | None] | None = None
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        plain.zero_grad()
        reference(tokens(10 * step)).backward()
        grads = [p.grad for p in reference.parameters()]
        if step < 2:
            plain.step()
        else:  # what is applied now was computed from the parameters one step older
            if late is not None:
                for param, grad in zip(reference.parameters(), late, strict=True):
                    param.grad = grad
                plain.step()
            late = grads
        assert_same(model, reference)
    optimizer.synchronize()
    for param, grad in zip(reference.parameters(), late or [], strict=True):
        param.grad = grad
    plain.step()
    assert_same(model, reference)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("optimizer_class", [HostAdamW, torch.optim.SGD])
def test_clips_by_the_norm_of_all_gradients(
    bus: Bus, norm_type: float, optimizer_class: Any
) -> None:
    model, plain = twins()
    mine = OffloadedOptimizer(
        model.parameters(), optimizer_class, bus=bus, transfer_cap_mb=0.0, lr=0.1
    )
    name = {HostAdamW: torch.optim.AdamW}.get(optimizer_class, optimizer_class)
    theirs = name(plain.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        model(tokens(step)).backward()
        plain(tokens(step)).backward()
        norm = mine.clip_grad_norm_(0.05, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(
            [p for p in plain.parameters() if p.numel()], 0.05, norm_type
        )
        torch.testing.assert_close(norm, expected)
        mine.step()
        theirs.step()
        theirs.zero_grad()
        assert_same(model, plain, 1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_clips_nothing(bus: Bus, bad: float) -> None:
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, transfer_cap_mb=0.0, **SETTINGS)
    model[0].weight.grad = torch.full((32, 32), bad)
    assert not optimizer.clip_grad_norm_(1.0).isfinite()
    optimizer.zero_grad()  # the step is skipped
    backward(model)
    assert optimizer.clip_grad_norm_(1.0).isfinite()
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.isfinite().all()
        assert not torch.equal(param, old)
    with pytest.raises(ValueError, match="max_norm=0 must be above 0"):
        optimizer.clip_grad_norm_(0)


def test_an_infinite_gradient_steps_as_torchs(bus: Bus) -> None:
    models = linear(), linear()
    makers = (partial(OffloadedAdamW, bus=bus), torch.optim.AdamW)
    for model, make in zip(models, makers, strict=True):
        optimizer = make(model.parameters(), **SETTINGS)
        backward(model)
        first = optimizer.grads()[-1] if isinstance(optimizer, OffloadedAdamW) else None
        (model[0].weight.grad if first is None else first).fill_(float("inf"))
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight, equal_nan=True)


def test_states_load_into_the_plain_optimizer_and_back(bus: Bus) -> None:
    model, plain = twins()
    mine = OffloadedAdamW(model.parameters(), bus=bus, **SETTINGS)
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False, **SETTINGS)
    train(model, mine, range(3))
    plain.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))  # torch shares what it loads
    train(plain, theirs, range(3, 6))

    again = Cruel()
    again.load_state_dict(plain.state_dict())
    back = OffloadedAdamW(again.parameters(), bus=bus, **SETTINGS)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(again, back, range(6, 9))
    train(model, mine, range(3, 9))
    assert_same(again, model)


def test_parameters_written_on_the_device_reach_the_host(bus: Bus) -> None:
    model, plain = twins()
    mine = OffloadedAdamW(model.parameters(), bus=bus, **SETTINGS)
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False, **SETTINGS)
    for one, optimizer in ((model, mine), (plain, theirs)):
        train(one, optimizer, range(2))
        with torch.no_grad():
            one.hidden.weight.mul_(0.5)
        one.load_state_dict({**one.state_dict(), "scale": torch.tensor(2.0)})
        train(one, optimizer, range(2, 4))
    assert_same(model, plain)


def test_groups_schedules_and_late_parameters_are_as_torchs(bus: Bus) -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> nn.Module:
        torch.manual_seed(0)
        model = Cruel()
        groups = [
            {"params": [model.embedding.weight, model.scale], "weight_decay": 0.0},
            {"params": [model.transposed], "lr": 1e-3},
        ]
        optimizer = make(groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(6):
            optimizer.zero_grad()
            model.zero_grad()
            model(tokens(step)).backward()
            optimizer.step()
            schedule.step()
            if step == 1:
                optimizer.add_param_group({"params": [model.hidden.weight], "betas": (0.5, 0.9)})
            if step == 3:
                optimizer.add_param_group({"params": list(model.frozen.parameters())})
                model.frozen.requires_grad_(True)
        return model

    mine = run(lambda groups: OffloadedAdamW(groups, bus=bus, **SETTINGS))
    assert_same(mine, run(lambda groups: torch.optim.AdamW(groups, foreach=False, **SETTINGS)))


def test_what_has_come_is_kept_when_a_group_is_added(bus: Bus) -> None:
    model, plain = twins()
    mine = OffloadedAdamW([model.embedding.weight], bus=bus, **SETTINGS)
    theirs = torch.optim.AdamW([plain.embedding.weight], foreach=False, **SETTINGS)
    for one, optimizer in ((model, mine), (plain, theirs)):
        one(tokens(0)).backward()
        optimizer.add_param_group({"params": [one.scale]})
        one(tokens(1)).backward()
        optimizer.step()
    assert_same(model, plain)


def test_closures_and_zeroed_gradients_are_as_torchs(bus: Bus) -> None:
    model, plain = twins()
    mine = OffloadedAdamW(model.parameters(), bus=bus, **SETTINGS)
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False, **SETTINGS)
    for one, optimizer in ((model, mine), (plain, theirs)):
        one(tokens(5)).backward()
        optimizer.zero_grad()

        def closure(one: nn.Module = one) -> torch.Tensor:
            loss = one(tokens(6))
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert_same(model, plain)


def test_a_gradient_written_after_it_left_is_refused_by_name(bus: Bus) -> None:
    model = linear()
    optimizer = OffloadedAdamW(model.named_parameters(), bus=bus)
    backward(model)
    model[2].weight.grad = torch.ones(32, 32)
    with pytest.raises(RuntimeError, match=r"2\.weight leaves .* during_backward=False"):
        optimizer.step()


def test_gaps_overlaps_and_sparse_gradients_are_refused_by_name(bus: Bus) -> None:
    gap = nn.Parameter(torch.zeros(4, 4)[:, :2])
    with pytest.raises(ValueError, match=r"gap .*strides \(4, 1\)"):
        OffloadedAdamW([("gap", gap)], bus=bus)
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = OffloadedAdamW(table.named_parameters(), bus=bus)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="gradient of weight is sparse"):
        table(torch.tensor([1])).sum().backward()


def test_an_error_of_the_host_is_raised_where_the_update_is_taken(bus: Bus) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError("the host has failed")

    for delay_after in (None, 0):
        model = linear()
        optimizer = OffloadedOptimizer(
            model.parameters(), Broken, bus=bus, delay_after=delay_after, lr=0.1
        )
        backward(model)
        with pytest.raises(ArithmeticError, match="the host has failed"):
            optimizer.step() if delay_after is None else take_late(optimizer)


def take_late(optimizer: OffloadedOptimizer) -> None:
    optimizer.step()
    optimizer.synchronize()


def test_its_parameters_do_not_keep_an_optimizer_alive(bus: Bus) -> None:
    model = linear()
    gone = weakref.ref(OffloadedAdamW(model.parameters(), bus=bus))
    gc.collect()
    assert gone() is None
    backward(model)
    assert all(p.grad is not None for p in model.parameters())


def test_the_host_holds_what_the_formula_says(bus: Bus) -> None:
    model = linear(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, transfer_cap_mb=0.0)
    for _ in range(2):
        backward(model)
        optimizer.step()
    numel, steps = sum(p.numel() for p in model.parameters()), 4 * 4

    def held() -> int:
        return sum(t.untyped_storage().nbytes() for t in optimizer.host_tensors)

    assert held() == 16 * numel + steps
    backward(model)
    backward(model)
    optimizer.step()
    inboxes = 2 * 32 * 32 * 2  # of two transfers; what is added up is in fp32
    assert held() == 18 * numel + steps + inboxes


@pytest.mark.parametrize("delay_after", [None, 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_forward_that_waits_computes_the_same(delay_after: int | None, parts: int) -> None:
    models = twins()
    with Bus(Link(1e-3, 1e6)) as slow:
        for model, waits in zip(models, (True, False), strict=True):
            optimizer = OffloadedAdamW(
                model.parameters(),
                bus=slow,
                transfer_cap_mb=1e-4,
                delay_after=delay_after,
                **SETTINGS,
            )
            if waits:
                optimizer.wait_in_forward(model)
            train(model, optimizer, range(5), parts)
            optimizer.synchronize()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_step_does_not_wait_where_forward_does() -> None:
    model = linear()
    with Bus(Link(60e-3, float("inf"))) as slow:  # the last of four is sent after two of these
        optimizer = OffloadedAdamW(model.parameters(), bus=slow, transfer_cap_mb=0.0, **SETTINGS)
        optimizer.wait_in_forward(model)
        first = model[0].weight.detach().clone()
        backward(model)
        optimizer.grads()  # all have arrived
        optimizer.step()
        assert slow.calls("to device") < 4  # the last layer's, at least, is still to come
        seen = {key: value.clone() for key, value in model.state_dict().items()}
        assert slow.calls("to device") == 4
        assert not torch.equal(seen["0.weight"], first)
        optimizer.synchronize()
        assert torch.equal(seen["3.weight"], model[3].weight)
        order = [t.name for t in slow.transfers]
        assert order.count("parameters") == 8  # read once by the host, returned once


def test_an_error_of_the_host_is_raised_by_the_forward_that_waits(bus: Bus) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError("the host has failed")

    model = linear()
    optimizer = OffloadedOptimizer(model.parameters(), Broken, bus=bus, lr=0.1)
    optimizer.wait_in_forward(model)
    backward(model)
    optimizer.step()
    with pytest.raises(ArithmeticError, match="the host has failed"):
        backward(model)


def test_training_goes_on_after_a_backward_that_failed(bus: Bus) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in the middle")

    models = twins()
    makers = (partial(OffloadedAdamW, bus=bus, transfer_cap_mb=0.0), torch.optim.AdamW)
    for model, make in zip(models, makers, strict=True):
        optimizer = make(model.parameters(), **SETTINGS)
        train(model, optimizer, range(2))
        broken = Fails.apply(model.embedding(tokens(0))) @ model.out.weight.t()
        with pytest.raises(ArithmeticError):
            broken.sum().backward()
        train(model, optimizer, range(2, 4))
    assert_same(*models)


def test_what_cannot_be_copied_says_so(bus: Bus) -> None:
    with pytest.raises(RuntimeError, match=r"OffloadedAdamW cannot be copied .* state_dict"):
        copy.deepcopy(OffloadedAdamW(linear().parameters(), bus=bus))


@pytest.mark.parametrize("parts", [1, 3])
def test_gradients_in_16_bits_are_added_up_in_full_precision(bus: Bus, parts: int) -> None:
    model, reference = linear(torch.bfloat16), linear(torch.bfloat16).float()
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, transfer_cap_mb=0.0, lr=1e-3)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for rows in range(1, parts + 1):
            copied = copy.deepcopy(model).requires_grad_()
            backward(copied, rows)
            for sum_, param in zip(total, copied.parameters(), strict=True):
                sum_ += param.grad
            backward(model, rows)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in total]))
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e-3), norm)
        for sum_, param in zip(total, reference.parameters(), strict=True):
            param.grad = sum_ * (1e-3 / norm)
        optimizer.step()
        plain.step()
    for param, exact in zip(model.parameters(), reference.parameters(), strict=True):
        master = optimizer.state[param]["master_param"]
        torch.testing.assert_close(master, exact.detach(), rtol=1e-5, atol=1e-6)


class DeviceWaits(Bus):
    """As on a GPU, `wait` holds up the device alone: what returns is read from the host's memory
    when somebody asks for it, or with `arrive`, before the device computes."""

    class Pending(Transfer):
        def wait(self) -> None:
            pass

        def finish(self) -> None:
            if not self.is_completed():
                self.run()
                self.end(0.0, 0.0)

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Transfer] = []

    def to_device(self, pairs: Any, name: str = "parameters") -> Transfer:
        self.pending.append(self.Pending(pairs, "to device", name))
        return self.pending[-1]

    def arrive(self) -> None:
        for transfer in self.pending:
            transfer.finish()
        self.pending.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delay_after", [None, 0])
def test_the_host_does_not_write_what_is_still_returning(
    bus: Bus, dtype: torch.dtype, delay_after: int | None
) -> None:
    models = linear(dtype), linear(dtype)
    with DeviceWaits() as device:
        for model, over in zip(models, (device, bus), strict=True):
            optimizer = OffloadedAdamW(
                model.parameters(), bus=over, transfer_cap_mb=0.0, delay_after=delay_after, lr=0.1
            )
            for rows in range(1, 6):
                device.arrive()
                backward(model, rows)
                optimizer.step()
                optimizer._late.submit(int).result()  # the host has done its part
            optimizer.synchronize()
            device.arrive()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
