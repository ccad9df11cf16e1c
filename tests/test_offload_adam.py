"""pdt.offload.adam: AdamW on the host is torch's, for every shape, layout, dtype and schedule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdt.offload import adam_pass, kernel
from pdt.offload.adam import (
    HostAdamW,
    Settings,
    adamw_foreach,
    adamw_fused,
    adamw_in_chunks,
    adamw_loop,
    adamw_one_pass,
    bytes_per_element,
    triad,
)

SHAPES = [(), (0,), (1,), (7,), (3, 5), (1025,)]
needs_compiler = pytest.mark.skipif(not kernel.available(), reason=kernel.why_not() or "built")
both = pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
passes = pytest.mark.parametrize(
    "one_pass", [pytest.param(adamw_one_pass, marks=needs_compiler), adamw_in_chunks]
)


def assert_close(ours: Tensor, right: Tensor, scale: float) -> None:
    """Within 1e-6 of the value, or of `scale` where a difference of large numbers is small."""
    torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6 * scale)


def gradients(shape: tuple[int, ...], steps: int = 5) -> list[Tensor]:
    """Of very different sizes, as gradients are."""
    return [torch.randn(shape) * 10.0 ** -(i % 3) for i in range(steps)]


def torch_steps(p: Tensor, grads: list[Tensor], **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What torch.optim.AdamW makes of a copy of `p`, and its moments."""
    param = nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([param], **arguments)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]


def own_steps(
    step: Callable[..., None], p: Tensor, grads: list[Tensor], settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for i, grad in enumerate(grads, 1):
        step([p], [grad], [m], [v], i, settings)
    return p, m, v


# The ladder


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("step", "how"),
    [
        (adamw_loop, {"foreach": False}),
        (adamw_foreach, {"foreach": True}),
        (adamw_fused, {"fused": True}),
    ],
)
def test_the_ways_of_torch_are_bitwise_its_own(
    step: Callable[..., None], how: dict[str, bool], shape: tuple[int, ...], maximize: bool
) -> None:
    torch.manual_seed(0)
    p, grads = torch.randn(shape), gradients(shape)
    settings = Settings(3e-3, (0.8, 0.99), 1e-6, 0.1, maximize)
    right = torch_steps(
        p, grads, lr=3e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, maximize=maximize, **how
    )
    for ours, theirs in zip(own_steps(step, p, grads, settings), right, strict=True):
        assert torch.equal(ours, theirs)


@passes
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.2), (0.0, 0.0)])
@pytest.mark.parametrize("shape", [*SHAPES, (2**16,), (2**16 + 1,)])
def test_one_pass_is_the_loop(
    one_pass: Callable[..., None],
    shape: tuple[int, ...],
    betas: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adam_pass, "CHUNK_NUMEL", 2**10)
    torch.manual_seed(0)
    p, grads = torch.randn(shape), gradients(shape)
    settings = Settings(3e-3, betas, weight_decay=0.1, maximize=True)
    right = own_steps(adamw_loop, p, grads, settings)
    p, m, v = own_steps(one_pass, p, grads, settings)
    assert_close(p, right[0], scale=3e-3)
    assert_close(m, right[1], scale=1.0)
    assert_close(v, right[2], scale=0.0)


@passes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_replaces_unscale_and_copy(
    one_pass: Callable[..., None], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    p, grad = torch.randn(1025), torch.randn(1025).to(dtype)
    right = own_steps(one_pass, p, [grad.float() / 64], Settings())
    ours = p.clone(), torch.zeros(1025), torch.zeros(1025), torch.empty(1025, dtype=torch.bfloat16)
    before = grad.clone()
    one_pass([ours[0]], [grad], [ours[1]], [ours[2]], 1, grad_scale=64.0, copies=[ours[3]])
    for mine, theirs in zip(ours, right, strict=False):
        assert torch.equal(mine, theirs)
    assert torch.equal(ours[3], right[0].bfloat16())
    assert torch.equal(grad, before)


@passes
def test_a_list_is_stepped_as_each_of_its_tensors(
    one_pass: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_pass, "CHUNK_NUMEL", 50)
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [torch.randn(n).to(d) for n, d in zip((7, 120, 49, 0, 50), dtypes, strict=True)]
    grads = [torch.randn(p.shape).to(p.dtype) for p in params]
    moments = [
        torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params
    ]
    copies = [None, torch.zeros(120), torch.zeros(49), None, torch.zeros(50).half()]
    lists = [params, grads, moments, [m.clone() for m in moments], copies]
    apart = copy.deepcopy(lists)
    one_pass(*lists[:4], 1, grad_scale=8.0, copies=copies)
    for p, g, m, v, low in zip(*apart, strict=True):
        one_pass([p], [g], [m], [v], 1, grad_scale=8.0, copies=[low])
    for i, tensors in enumerate(zip(*lists, strict=True)):
        for j, tensor in enumerate(tensors):
            if tensor is not None:
                torch.testing.assert_close(tensor, apart[j][i], rtol=1e-6, atol=1e-9)


def awkward(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in float32, the ties between neighbours, and next to them."""
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    bits = exact.view(torch.int32)
    half = 1 << 15 if dtype == torch.bfloat16 else 1 << 12
    near = [(bits + half + i).view(torch.float32) for i in (-1, 0, 1)]
    return torch.cat([exact, *near, torch.tensor([1e38, 65519.9, 65520.0, 1e-8, 1e-40])])


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, but for what a NaN carries."""
    nan = a.isnan()
    signs = torch.equal(a.signbit()[~nan], b.signbit()[~nan])
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan]) and signs


@passes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_is_rounded_as_torch_rounds(
    one_pass: Callable[..., None], dtype: torch.dtype
) -> None:
    p = torch.cat([awkward(torch.bfloat16), awkward(torch.float16)])
    zeros, low = [torch.zeros_like(p) for _ in range(3)], torch.empty_like(p, dtype=dtype)
    one_pass([p], zeros[:1], zeros[1:2], zeros[2:], 1, Settings(lr=0.0), copies=[low])
    assert same(low, p.to(dtype))


@passes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_and_written_exactly(
    one_pass: Callable[..., None], dtype: torch.dtype
) -> None:
    p = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    kept, m, v = p.clone(), torch.zeros(2**16), torch.zeros(2**16)
    one_pass([p], [torch.zeros_like(p)], [m], [v], 1, Settings(lr=0.0))
    assert same(p, kept)
    one_pass([torch.zeros(2**16)], [p], [m], [v], 1, Settings(betas=(0.0, 0.0)))
    finite = kept.isfinite()
    assert torch.equal(m[finite], kept.float()[finite])  # the first moment is then the gradient


@needs_compiler
def test_the_bits_depend_neither_on_the_threads_nor_on_the_cut() -> None:
    torch.manual_seed(0)
    numel = 100_003
    p, grads, threads = torch.randn(numel), gradients((numel,), 2), torch.get_num_threads()
    right = own_steps(adamw_one_pass, p, grads, Settings())
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            ours = own_steps(adamw_one_pass, p, grads, Settings())
            assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
            tensors = [p.clone(), torch.zeros(numel), torch.zeros(numel)]
            cut = [list(t.split([1, 0, 7, 40_000, 15, 16, 17, 59_947])) for t in tensors]
            for i, grad in enumerate(grads, 1):
                pieces = list(grad.split([len(piece) for piece in cut[0]]))
                adamw_one_pass(cut[0], pieces, cut[1], cut[2], i)
            assert all(torch.equal(a, b) for a, b in zip(tensors, right, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_tensors_that_do_not_fit_are_refused() -> None:
    def step(**other: Any) -> None:
        tensors = dict(zip(("p", "g", "m", "v"), torch.zeros(4, 3, 5).unbind(), strict=True))
        tensors.update(other)
        adamw_one_pass(*([t] for t in tensors.values()), 1)

    step()
    for wrong, said in [
        ({"g": torch.zeros(5, 3).t()}, r"grads\[0\].*strides \(1, 3\)"),
        ({"m": torch.zeros(15)}, r"exp_avgs\[0\].*\(15,\)"),
        ({"v": torch.zeros(3, 5).bfloat16()}, r"exp_avg_sqs\[0\].*bfloat16"),
        ({"p": torch.zeros(3, 6)[:, :5]}, r"params\[0\].*gaps"),
        ({"p": torch.zeros(3, 5).int()}, "int32"),
    ]:
        with pytest.raises(ValueError, match=said):
            step(**wrong)
    one = [torch.zeros(3)]
    with pytest.raises(ValueError, match="step=0"):
        adamw_one_pass(one, one, one, one, 0)
    with pytest.raises(ValueError, match="grad_scale=0"):
        adamw_one_pass(one, one, one, one, 1, grad_scale=0.0)
    with pytest.raises(ValueError, match="lr=nan"):
        Settings(lr=float("nan"))


def test_a_step_moves_as_many_bytes_as_the_formula_says() -> None:
    assert [bytes_per_element(v) for v in ("loop", "foreach", "fused", "one_pass")] == [
        80,
        80,
        28,
        28,
    ]
    assert bytes_per_element("one_pass", copy_nbytes=2, scaled=True) == 30  # as the paper counts
    assert bytes_per_element("fused", copy_nbytes=2, scaled=True) == 28 + 8 + 6
    assert bytes_per_element("one_pass", copy_nbytes=2, write_allocate=True) == 32
    assert bytes_per_element("one_pass", grad_nbytes=2) == 26
    assert bytes_per_element("loop", write_allocate=True) == 88
    with pytest.raises(ValueError, match="variant='two_pass'"):
        bytes_per_element("two_pass")


@both
def test_the_triad_is_measured(compiled: bool) -> None:
    assert triad(1000, repeats=1, compiled=compiled) > 0
    if compiled:
        a, b, c = torch.randn(3, 1001).unbind()
        kernel.get().triad(a, b, c, 3.0)
        torch.testing.assert_close(a, b + 3 * c)


# The optimizer


def layouts() -> list[Tensor]:
    plain = [torch.randn(shape) for shape in SHAPES]
    turned = torch.randn(6, 4).t()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gaps = torch.randn(5, 8)[:, 1:4]
    line = torch.randn(5).as_strided((5, 1), (1, 7))  # contiguous, though its strides look odd
    return [*plain, turned, image, line, gaps, torch.randn(3, 4, 5).permute(2, 0, 1)]


def twins(tensors: list[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Two sets of parameters with the same values and strides."""

    def twin(t: Tensor) -> nn.Parameter:
        size = sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True)) + 1
        room = torch.zeros(max(size, 1)).to(t.dtype)
        return nn.Parameter(room.as_strided(t.shape, t.stride()).copy_(t))

    return [twin(t) for t in tensors], [twin(t) for t in tensors]


def assert_same_training(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, lr: float
) -> None:
    for group, right in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], right["params"], strict=True):
            assert p.stride() == q.stride()
            assert_close(p.detach(), q.detach(), scale=lr)
            state, other = ours.state[p], theirs.state[q]
            assert state["step"].item() == other["step"].item()
            assert_close(state["exp_avg"], other["exp_avg"].float(), scale=1.0)
            assert_close(state["exp_avg_sq"], other["exp_avg_sq"].float(), scale=0.0)


@both
def test_training_is_torch_s_for_every_shape_and_schedule(compiled: bool) -> None:
    # deepspeed #1643, PR #1823, PR #3109, ColossalAI PR #633
    torch.manual_seed(0)
    mine, right = twins(layouts())
    late, late_right = twins([torch.randn(9, 3).t()])
    held: list[Tensor] = []

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        other = {"params": params[5:], "lr": 3e-3, "betas": (0.7, 0.9), "weight_decay": 0.2}
        return [{"params": params[:5]}, other]

    ours = HostAdamW(groups(mine), lr=1e-2, compiled=compiled)
    theirs = torch.optim.AdamW(groups(right), lr=1e-2, foreach=False)
    for step in range(6):
        if step == 2:
            ours.add_param_group({"params": late, "lr": 1e-3})
            theirs.add_param_group({"params": late_right, "lr": 1e-3})
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        for p, q in zip([*mine, *late], [*right, *late_right], strict=True):
            p.grad = torch.randn(p.shape)  # contiguous, also where the parameter is not
            if step == 4:
                p.grad = torch.randn(()).expand(p.shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        assert_same_training(ours, theirs, lr=1e-2)
        if step == 3:
            held = [ours.state[p]["exp_avg"] for p in mine]
    assert [ours.state[p]["step"].item() for p in (mine[0], late[0])] == [6, 4]
    assert all(ours.state[p]["exp_avg"] is m for p, m in zip(mine, held, strict=True))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits_are_stepped_in_float32_and_rounded_once(
    compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_pass, "CHUNK_NUMEL", 50)
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(33, 31).to(dtype).t())
    ours, right = HostAdamW([param], lr=1e-2, compiled=compiled), param.detach().clone()
    m, v = (
        torch.zeros_like(right, dtype=torch.float32),
        torch.zeros_like(right, dtype=torch.float32),
    )
    for step in range(1, 6):
        param.grad = torch.randn(31, 33).to(dtype)
        ours.step()
        wide = right.float()
        adamw_loop([wide], [param.grad.float()], [m], [v], step, Settings(lr=1e-2))
        right.copy_(wide)
        # A sum at the middle between two numbers may go either way by its last bit.
        differ = param.detach() != right
        assert differ.float().mean() <= 2e-3
        right.copy_(param.detach())
    for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
        assert ours.state[param][name].dtype == torch.float32
        assert_close(ours.state[param][name], moment, scale=1.0)


@both
def test_float64_stays_float64(compiled: bool) -> None:
    torch.manual_seed(0)
    mine, right = nn.Parameter(torch.randn(7).double()), torch.randn(0)
    grads = [g.double() for g in gradients((7,))]
    right, _, _ = torch_steps(mine.detach(), grads, foreach=False)
    ours = HostAdamW([mine, nn.Parameter(torch.ones(3))], compiled=compiled)
    for grad in grads:
        mine.grad = grad
        ours.step()
    torch.testing.assert_close(mine.detach(), right, rtol=1e-12, atol=0)
    assert ours.state[mine]["exp_avg"].dtype == torch.float64


@both
def test_state_dicts_load_either_way_and_go_on(compiled: bool) -> None:
    torch.manual_seed(0)
    mine, right = twins(layouts())
    ours = HostAdamW(mine, lr=1e-2, compiled=compiled)
    theirs = torch.optim.AdamW(right, lr=1e-2, foreach=False)

    def step() -> None:
        for p, q in zip(mine, right, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()

    step()
    ours, saved = HostAdamW(mine, lr=9.0, compiled=compiled), theirs.state_dict()
    ours.load_state_dict(saved)
    step()
    assert_same_training(ours, theirs, lr=1e-2)
    theirs = torch.optim.AdamW(right, lr=9.0, foreach=False)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    step()
    assert_same_training(ours, theirs, lr=1e-2)


def test_loading_keeps_float32_moments_of_16_bit_parameters() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(5, 3).bfloat16().t())
    param.grad = torch.randn(3, 5).bfloat16()
    ours = HostAdamW([param])
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].contiguous()  # another layout
    other = HostAdamW([param])
    other.load_state_dict(saved)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(other.state[param][name], saved["state"][0][name])
        assert other.state[param][name].stride() == param.stride()
    other.step()  # and what was loaded is its own
    assert torch.equal(saved["state"][0]["exp_avg_sq"], ours.state[param]["exp_avg_sq"])


def test_hooks_on_loading_see_and_change_what_is_loaded() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    ours, seen = HostAdamW([param]), []
    ours.step()
    saved = ours.state_dict()

    def double(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        state = {0: {**saved["state"][0], "exp_avg": 2 * saved["state"][0]["exp_avg"]}}
        return {**saved, "state": state}

    ours.register_load_state_dict_pre_hook(double)
    ours.register_load_state_dict_post_hook(lambda o: seen.append(o.state[param]["exp_avg"]))
    ours.load_state_dict(saved)
    assert torch.equal(seen[0], 2 * saved["state"][0]["exp_avg"])


def test_states_of_something_else_are_refused_and_change_nothing() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    ours = HostAdamW([param], lr=0.5)
    for other, said in [
        (torch.optim.AdamW([param], amsgrad=True), "amsgrad"),
        (torch.optim.Adam([param]), "is of Adam"),
        (torch.optim.SGD([param], momentum=0.9), "exp_avg"),
    ]:
        other.step()
        with pytest.raises(ValueError, match=said):
            ours.load_state_dict(other.state_dict())
    larger = nn.Parameter(torch.zeros(4))
    larger.grad = torch.ones(4)
    other = HostAdamW([larger])
    other.step()
    with pytest.raises(ValueError, match=r"\(4\).*\(3,\)|4.*\(3,\)"):
        ours.load_state_dict(other.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5
    assert not ours.state


@both
def test_scale_and_copies_replace_the_passes_around_a_step(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_pass, "CHUNK_NUMEL", 50)
    torch.manual_seed(0)
    mine, right = twins(layouts())
    ours = HostAdamW(mine, lr=1e-2, compiled=compiled)
    theirs = torch.optim.AdamW(right, lr=1e-2, foreach=False)
    low = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in mine[::2]}
    low[mine[1]] = torch.empty(mine[1].shape)
    low[mine[-1]] = torch.empty(mine[-1].shape, dtype=torch.float16)  # other strides
    low[mine[-2]] = torch.empty(mine[-2].shape)  # the parameter has gaps
    ours.copies = low
    for scale in (1024.0, torch.tensor(1024.0), torch.tensor([1024.0])):
        ours.grad_scale = scale
        for p, q in zip(mine, right, strict=True):
            p.grad = 1024 * torch.randn(p.shape)
            q.grad = p.grad / 1024
        sent = [p.grad.clone() for p in mine if p.grad is not None]
        ours.step()
        theirs.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(mine, sent, strict=True))
        for p, written in low.items():
            assert torch.equal(written, p.detach().to(written.dtype))
    assert_same_training(ours, theirs, lr=1e-2)
    ours.copies = {mine[3]: torch.empty(8)}
    with pytest.raises(ValueError, match="parameter 3"):
        ours.step()


def test_it_works_with_a_loss_scaler() -> None:
    torch.manual_seed(0)
    mine, right = twins([torch.randn(7), torch.randn(3, 5)])
    ours, theirs = HostAdamW(mine, lr=1e-2), torch.optim.AdamW(right, lr=1e-2, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        x = float("inf") if step == 2 else 1.0 + step
        for params, optimizer in ((mine, ours), (right, theirs)):
            optimizer.zero_grad()
            loss = sum(((p * x) ** 2).sum() for p in params)
            if optimizer is ours:
                scaler.scale(loss).backward()
                if step == 3:
                    scaler.unscale_(ours)
                scaler.step(ours)
                scaler.update()
            elif step != 2:  # a scaler leaves out the step whose gradients overflow
                loss.backward()
                theirs.step()
    assert_same_training(ours, theirs, lr=1e-2)
    assert ours.grad_scale == 1.0


@both
def test_a_gradient_of_16_bits_steps_a_parameter_of_32(compiled: bool) -> None:
    param = nn.Parameter(torch.randn(1025))
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch ties a gradient's dtype to its parameter's")
    param.grad_dtype = torch.bfloat16
    param.grad = torch.randn(1025).bfloat16()
    right = torch_steps(param.detach(), [param.grad.float()], foreach=False)
    HostAdamW([param], compiled=compiled).step()
    assert_close(param.detach(), right[0], scale=1e-3)


@both
def test_a_graph_that_saved_a_parameter_is_not_valid_after_a_step(compiled: bool) -> None:
    param = nn.Parameter(torch.ones(3))
    low = torch.ones(3, dtype=torch.bfloat16)
    ours = HostAdamW([param], compiled=compiled)
    ours.copies = {param: low}
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    versions = param._version, low._version
    ours.step()
    assert param._version > versions[0]
    assert low._version > versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_has_no_gradient_is_left_alone() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    unused, used = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    ours = HostAdamW([frozen, unused, used, counts])
    HostAdamW([nn.Parameter(torch.ones(2))]).step()  # no gradient at all
    for _ in range(2):
        used.grad = torch.ones(3)
        ours.step()
    for param in (frozen, unused, counts):
        assert torch.equal(param.detach(), torch.ones(3, dtype=param.dtype))
    assert set(ours.state) == {used}
    unused.grad = torch.ones(3)
    used.grad = None
    ours.step()  # with a step count of its own
    assert [ours.state[p]["step"].item() for p in (used, unused)] == [2, 1]


def test_optimizers_of_one_process_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    grads = gradients((7,))
    first, second = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    optimizers = HostAdamW([first]), HostAdamW([second], lr=0.1)
    for grad in grads:
        first.grad, second.grad = grad, grad
        for optimizer in optimizers:
            optimizer.step()
    right, _, _ = torch_steps(torch.ones(7), grads, foreach=False)
    assert_close(first.detach(), right, scale=1e-3)


def test_closures_schedules_and_tensor_rates_are_torch_s() -> None:
    mine, right = twins([torch.ones(5)])
    ours = HostAdamW(mine, lr=torch.tensor(0.1))
    theirs = torch.optim.AdamW(right, lr=0.1, foreach=False)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (ours, theirs)]

    def closure(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    for _ in range(4):
        loss = ours.step(lambda: closure(mine, ours))
        right_loss = theirs.step(lambda: closure(right, theirs))
        torch.testing.assert_close(loss, right_loss)
        for schedule in schedules:
            schedule.step()
    assert_same_training(ours, theirs, lr=0.1)


def test_it_can_be_copied_and_pickled() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    ours = HostAdamW([param])
    ours.step()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        twin = other.param_groups[0]["params"][0]
        twin.grad = torch.ones(3)
        other.step()
        assert other.state[twin]["step"].item() == 2


@pytest.mark.parametrize(
    ("param", "said"),
    [
        (
            torch.zeros(3, device="meta"),
            r"named.weight is on meta.*torch.optim.AdamW\(fused=True\)",
        ),
        (torch.zeros(3, dtype=torch.complex64), "named.weight is torch.complex64"),
        (torch.zeros(3, 1).expand(3, 4), r"named.weight .*strides \(1, 0\).*share memory"),
        (torch.zeros(9).as_strided((3, 3), (1, 2)), "share memory"),
    ],
)
def test_parameters_that_cannot_be_stepped_here_are_refused_by_name(
    param: Tensor, said: str
) -> None:
    good = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=said):
        HostAdamW([("good", good), ("named.weight", nn.Parameter(param))])
    ours = HostAdamW([good])
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        ours.add_param_group({"params": [nn.Parameter(param)]})
    assert len(ours.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    table, dense = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    ours = HostAdamW([("dense", dense), ("table.weight", table.weight)])
    dense.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"table\.weight.*sparse"):
        ours.step()
    assert torch.equal(dense.detach(), torch.ones(2))


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"weight_decay": float("nan")}]
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HostAdamW([nn.Parameter(torch.ones(1))], **wrong)


@pytest.mark.gpu
def test_a_parameter_that_moved_to_the_gpu_is_refused() -> None:
    layer = nn.Linear(2, 2)
    ours = HostAdamW(layer.parameters())
    layer.cuda()
    layer(torch.ones(1, 2, device="cuda")).sum().backward()
    with pytest.raises(ValueError, match="is on cuda:0"):
        ours.step()


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_find", lambda: "no C compiler (cc, gcc, clang) on the path")
    assert not kernel.available()
    param = nn.Parameter(torch.ones(7))
    with pytest.raises(RuntimeError, match=r"no C compiler.*Install"):
        HostAdamW([param], compiled=True)
    param.grad = torch.ones(7)
    ours = HostAdamW([param])
    ours.copies = {param: (low := torch.zeros(7, dtype=torch.float16))}
    ours.step()
    right, _, _ = torch_steps(torch.ones(7), [torch.ones(7)], foreach=False)
    assert_close(param.detach(), right, scale=1e-3)
    assert torch.equal(low, param.detach().half())
    assert triad(100, repeats=1) > 0


@needs_compiler
def test_a_dtype_that_the_compiler_lacks_takes_torch_s_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(kernel.get().kinds, torch.float16)
    used: list[int] = []
    real = adam_pass.adamw_fused
    monkeypatch.setattr(adam_pass, "adamw_fused", lambda *args: (used.append(1), real(*args))[1])
    for dtype in (torch.bfloat16, torch.float16):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        param.grad = torch.ones(3, dtype=dtype)
        HostAdamW([param], lr=0.5).step()
        assert param[0] < 0.6
        assert len(used) == (dtype == torch.float16)
