"""The law of a data-parallel step, held to arithmetic, to its own data and to DDP's figures."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

from pdt.comm.cost import ring_all_reduce_s
from pdt.comm.topology import Link
from pdt.plan.scaling import DataParallelStep, even_buckets, fit_scaling, pipelined_s

ROOT = Path(__file__).parents[1]
PUBLISHED = json.loads((ROOT / "tests" / "data" / "ddp_figures.json").read_text())
FIGURE_9 = PUBLISHED["figure9_seconds"]
GPUS = FIGURE_9["gpus"]
CURVES = ["ResNet50 NCCL", "ResNet50 gloo", "BERT NCCL", "BERT gloo"]
MiB = 2**20


def published(curve: str) -> DataParallelStep:
    """One GPU's step: Figure 9's time, split as Figure 6 splits compute, buckets of 25 MiB."""
    alone_s = FIGURE_9[curve][0]
    forward, backward, _, optimizer, _ = PUBLISHED["figure6_32_gpus"][curve]
    share_s = alone_s / (forward + backward + optimizer)
    nbytes = PUBLISHED["gradient_nbytes"][curve.split()[0]]
    parts = (forward * share_s, backward * share_s, optimizer * share_s)
    return DataParallelStep(*parts, even_buckets(nbytes, 25 * MiB))


def test_transfers_wait_for_gradients_and_for_the_wire() -> None:
    assert pipelined_s([1, 2, 3], [5, 1, 1]) == 8  # the wire is busy
    assert pipelined_s([1, 2, 3], [0.5, 0.5, 0.5]) == 3.5  # the last tail alone is exposed
    assert pipelined_s([], []) == 0


def test_one_rank_computes_and_sends_nothing() -> None:
    step = DataParallelStep(1.0, 2.0, 0.5, (8.0, 8.0), Link(1.0, 1.0), noise=0.3)
    assert step.step_s(1) == step.bound_s(1) == step.unoverlapped_s(1) == 3.5


@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e9])
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("n", [2, 3, 64])
def test_overlap_lies_between_its_bound_and_none(n: int, noise: float, bandwidth: float) -> None:
    buckets = (1e5, 2e5, 3e5)
    step = DataParallelStep(0.1, 0.2, 0.01, buckets, Link(1e-4, bandwidth), noise)
    assert step.bound_s(n) < step.step_s(n) < step.unoverlapped_s(n)


def test_what_backward_outlasts_is_hidden_but_for_the_last_bucket() -> None:
    link = Link(1e-3, 1e8)
    step = DataParallelStep(0.1, 1.0, 0.0, (1e6, 1e6, 5e5), link)
    assert step.exposed_s(4) == pytest.approx(ring_all_reduce_s(5e5, 4, link))


def test_the_slowest_of_n_is_delayed_by_the_harmonic_number() -> None:
    step = DataParallelStep(1.0, 0.0, 0.0, (1.0,), noise=0.1)
    assert step.slowest(1) == 1
    assert step.slowest(4) == pytest.approx(1 + 0.1 * (1 / 2 + 1 / 3 + 1 / 4))
    assert step.step_s(4) == pytest.approx(step.slowest(4))


def test_even_buckets_hold_everything_and_none_is_above_its_cap() -> None:
    buckets = even_buckets(101, 25)
    assert len(buckets) == 5
    assert sum(buckets) == pytest.approx(101)
    assert max(buckets) <= 25


@pytest.mark.parametrize(("bandwidth", "noise"), [(5e8, 0.1), (2e9, 0.3), (1e9, 0.0)])
def test_the_fit_finds_the_constants_that_made_the_times(bandwidth: float, noise: float) -> None:
    made = DataParallelStep(0.1, 0.2, 0.01, even_buckets(4e8, 5e7), Link(0.0, bandwidth), noise)
    blank = DataParallelStep(0.1, 0.2, 0.01, made.buckets)
    counts = [2, 4, 8, 16, 32]
    found = fit_scaling(blank, counts, [made.step_s(n) for n in counts])
    assert found.noise == pytest.approx(noise, abs=0.01)
    assert found.step_s(256) == pytest.approx(made.step_s(256), rel=0.02)


def fitted_to(curve: str, largest: int) -> tuple[DataParallelStep, float]:
    """The fit to a curve's points up to `largest` GPUs, and by how much it is off at 256."""
    seconds = FIGURE_9[curve]
    seen = [(n, t) for n, t in zip(GPUS, seconds, strict=True) if n <= largest]
    fitted = fit_scaling(published(curve), *zip(*seen, strict=True))
    ratios = fitted.step_s(256) / fitted.step_s(1), seconds[-1] / seconds[0]
    return fitted, ratios[0] / ratios[1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("largest", [32, 64])
def test_figure_9_at_256_gpus_follows_from_its_smaller_counts(curve: str, largest: int) -> None:
    """Two constants a curve from five or six points; the ratio of 256 GPUs to 1 is within 15 %."""
    fitted, off = fitted_to(curve, largest)
    assert abs(off) < 0.15
    assert fitted.noise > 0.1


@pytest.mark.slow
def test_figure_9_depends_on_the_points_where_a_curve_falls() -> None:
    """BERT over NCCL was slower on 16 GPUs than on 32, 64 and 128: no law of n does that.

    With its 128th GPU among the points the best fit has no stragglers and is too low at 256. From
    16 GPUs and fewer, BERT is not to be predicted on either backend.
    """
    fitted, off = fitted_to("BERT NCCL", 128)
    assert fitted.noise < 0.05
    assert -0.25 < off < -0.15
    assert all(abs(fitted_to(curve, 16)[1]) > 0.3 for curve in ("BERT NCCL", "BERT gloo"))


@pytest.mark.parametrize("curve", ["ResNet50 NCCL", "ResNet50 gloo", "BERT gloo"])
def test_without_stragglers_figure_9_does_not_follow(curve: str) -> None:
    """A ring's bytes are as good as all there at 32 GPUs: the rest of the growth is waiting."""
    step, seconds = published(curve), FIGURE_9[curve]
    parts = step.forward_s, step.backward_s, step.optimizer_s, step.buckets
    best = min(
        (DataParallelStep(*parts, Link(0.0, 10 ** (8 + i / 20))) for i in range(61)),
        key=lambda ring: sum(
            (ring.step_s(n) / t - 1) ** 2 for n, t in zip(GPUS[1:6], seconds[1:6], strict=True)
        ),
    )
    assert best.step_s(256) / seconds[-1] - 1 < -0.15


@pytest.mark.parametrize("curve", CURVES)
def test_figure_6_reaches_most_of_the_largest_possible_gain(curve: str) -> None:
    forward, backward, communication, optimizer, overlapped = PUBLISHED["figure6_32_gpus"][curve]
    assert forward + backward + communication + optimizer == pytest.approx(1, abs=0.01)
    gain = (1 - overlapped) / (1 - (forward + max(backward, communication) + optimizer))
    assert 0.8 < gain < 1


@pytest.mark.parametrize("curve", ["ResNet50 NCCL", "ResNet50 gloo"])
def test_figure_10_pays_what_sharing_costs_once_in_eight(curve: str) -> None:
    """Without other information: all beyond one GPU's time is paid by every eighth micro-batch."""
    alone_s, shared_s = FIGURE_9[curve][0], FIGURE_9[curve][-1]
    gain = (1 - 1 / 8) * (shared_s - alone_s) / shared_s
    printed = PUBLISHED["figure10_gain_of_no_sync_8_at_256_gpus"][curve]
    assert gain == pytest.approx(printed, rel=0.2)


def test_a_fit_needs_two_points_and_a_step_needs_times() -> None:
    step = DataParallelStep(1.0, 1.0, 1.0, (1.0,))
    with pytest.raises(ValueError, match="2 counts of ranks"):
        fit_scaling(step, [1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match="0 or more"):
        DataParallelStep(-1.0, 1.0, 1.0, (1.0,))
    with pytest.raises(ValueError, match="one size or more"):
        DataParallelStep(1.0, 1.0, 1.0, ())
    with pytest.raises(ValueError, match="positive"):
        even_buckets(0, math.inf)


def test_lesson_06_prints_these_figures() -> None:
    """A notebook carries its numbers with it; they are those of the data."""
    notebook = json.loads((ROOT / "notebooks" / "06_overlap.ipynb").read_text())
    cells = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    nodes = (node for cell in cells if "FIGURE_" in cell for node in ast.parse(cell).body)
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.List)
    }
    figure_6 = {name: list(row) for name, row in tables["FIGURE_6"].items()}
    assert figure_6 == {name: PUBLISHED["figure6_32_gpus"][name] for name in CURVES}
    assert tables["FIGURE_9"] == {name: FIGURE_9[name] for name in CURVES}
    assert tables["GPUS"] == GPUS
