"""Interval arithmetic, spans, their sums, traces and the spans of modules."""

import json
import pickle
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pdt.measure import intervals
from pdt.measure.modules import module_spans
from pdt.measure.timeline import LANES, TRANSFERS, Span, Timeline

pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def cells(some):
    return {cell for start, end in some for cell in range(start, end)}


@settings(deadline=None)
@given(pieces, pieces)
def test_interval_arithmetic_is_that_of_sets(a, b):
    assert cells(intervals.union(a)) == cells(a)
    assert cells(intervals.intersection(a, b)) == cells(a) & cells(b)
    assert cells(intervals.difference(a, b)) == cells(a) - cells(b)
    assert intervals.length(a) == len(cells(a))
    for result in (
        intervals.union(a),
        intervals.intersection(a, b),
        intervals.difference(a, b),
    ):
        assert all(start < end for start, end in result)
        assert all(left[1] < right[0] for left, right in pairwise(result))


@settings(deadline=None)
@given(pieces, st.booleans())
def test_spans_of_one_track_are_disjoint_or_nested(a, nest):
    numbers = intervals.tracks(a, nest=nest)
    for i, (start, end) in enumerate(a):
        for j, (other_start, other_end) in enumerate(a[:i]):
            if numbers[i] == numbers[j]:
                apart = end <= other_start or other_end <= start
                inside = (start <= other_start and other_end <= end) or (
                    other_start <= start and end <= other_end
                )
                assert apart or (nest and inside)


spans = st.builds(
    lambda name, times, lane, rank, nbytes: Span(
        name, min(times), max(times), lane, f"kind {name}", rank, nbytes
    ),
    st.sampled_from(["a", "b"]),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.sampled_from(LANES),
    st.integers(0, 2),
    st.none() | st.integers(0, 9),
)


@settings(deadline=None)
@given(st.lists(spans, max_size=12))
def test_overlap_and_exposed_split_the_communication(some):
    timeline = Timeline(some)
    overlap, exposed, compute = timeline.overlap(), timeline.exposed(), timeline.busy("compute")
    assert list(overlap) == sorted({span.rank for span in some})
    for rank in timeline.ranks:
        wire = [(s.start_s, s.end_s) for s in some if s.rank == rank and s.lane in TRANSFERS]
        assert overlap[rank] + exposed[rank] == intervals.length(wire)
        assert overlap[rank] <= compute[rank]


@settings(deadline=None)
@given(st.lists(spans, max_size=12))
def test_saved_traces_load_and_slices_nest(some):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        Timeline(some).save(path)
        loaded = Timeline.load(path)
        events = json.loads(path.read_text())["traceEvents"]
    assert len(loaded.spans) == len(some)
    for before, after in zip(sorted(some), sorted(loaded.spans), strict=True):
        assert after.start_s == pytest.approx(before.start_s, abs=1e-9)
        assert after.end_s == pytest.approx(before.end_s, abs=1e-9)
    fields = [(s.name, s.lane, s.kind, s.rank, s.nbytes) for s in some]
    assert sorted(map(repr, fields)) == sorted(
        repr((s.name, s.lane, s.kind, s.rank, s.nbytes)) for s in loaded.spans
    )
    slices = [event for event in events if event["ph"] == "X"]
    assert min((event["ts"] for event in slices), default=0) == 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= named
    for key in named:
        members = [e for e in slices if (e["pid"], e["tid"]) == key]
        pairs = [(round(e["ts"]), round(e["ts"] + e["dur"])) for e in members]
        assert set(intervals.tracks(pairs, nest=True)) <= {0}


def record(op, start_s, end_s, peer=None):
    return SimpleNamespace(op=op, nbytes=8, start_s=start_s, end_s=end_s, peer=peer)


def test_records_fill_the_lanes_they_occupy():
    timeline = Timeline.from_records(
        [record("all_reduce", 1, 2), record("send", 2, 3, peer=1), record("recv", 3, 5, peer=2)]
        + [record("broadcast", 4, None, peer=0), record("barrier", None, None)],
        rank=3,
    )
    assert timeline.busy("send") == {3: 2}
    assert timeline.busy("recv") == {3: 3}
    assert timeline.busy("compute") == {3: 0}
    assert timeline.exposed() == {3: 4}
    assert timeline.skipped == 2
    assert [span.name for span in timeline.spans] == ["all_reduce"] * 2 + [
        "send to 1",
        "recv from 2",
    ]
    assert Timeline.merge([timeline, Timeline.from_records([], 0)]).skipped == 2


def test_an_empty_timeline_has_nothing_to_sum(tmp_path):
    empty = Timeline()
    assert empty.overlap() == empty.exposed() == empty.busy("send") == {}
    empty.save(tmp_path / "trace.json")
    assert Timeline.load(tmp_path / "trace.json") == empty
    assert Timeline.merge([]) == empty


def test_spans_are_recorded_pickled_and_compared():
    timeline = Timeline(rank=2)
    with pytest.raises(ZeroDivisionError):
        with timeline.span("step", kind="optimizer"):
            raise ZeroDivisionError
    (span,) = timeline.spans
    assert (span.name, span.kind, span.lane, span.rank) == ("step", "optimizer", "compute", 2)
    assert span.duration_s >= 0
    copy = pickle.loads(pickle.dumps(timeline))
    assert copy == timeline
    assert copy.spans[0] == span
    assert hash(copy.spans[0]) == hash(span)
    assert Span("b", 0, 1) < Span("a", 0, 2) < Span("a", 1, 1)
    assert timeline.between(span.end_s + 1, span.end_s + 2).spans == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Span("x", 2, 1), "end_s=1 lies before start_s=2"),
        (lambda: Span("x", 0, float("nan")), "end_s=nan"),
        (lambda: Span("x", 0, 1, lane="network"), "lane='network'"),
        (lambda: Timeline().busy("network"), "lane='network'"),
    ],
)
def test_impossible_spans_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_trace_of_another_tool_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('[{"ph": "X"}]')
    with pytest.raises(ValueError, match="is not a trace"):
        Timeline.load(path)


class Slow(torch.autograd.Function):
    """The identity, which takes its time in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        time.sleep(self.forward_s)
        return Slow.apply(x * self.weight, self.backward_s)


def durations(timeline, kind):
    return {span.name: span.duration_s for span in timeline.spans if span.kind == kind}


def test_modules_show_their_own_forward_and_backward():
    model = nn.Sequential(Sleeper(0.02, 0.04), nn.ReLU(inplace=True), Sleeper(0.04, 0.08))
    x = torch.ones(3)  # needs no gradient, so the first module has none to hand on
    with module_spans(model, rank=1) as timeline:
        (x + model(x)).sum().backward()
    forward, backward = durations(timeline, "forward"), durations(timeline, "backward")
    assert list(forward) == ["0", "1", "2"]
    assert set(backward) == {"0", "1", "2"}
    assert forward["0"] >= 0.02  # a sleep is never shorter than asked
    assert forward["2"] >= 0.04
    assert backward["0"] >= 0.04
    assert backward["2"] >= 0.08
    ends = {(s.name, s.kind): (s.start_s, s.end_s) for s in timeline.spans}
    order = [("0", "forward"), ("1", "forward"), ("2", "forward")]
    order += [("2", "backward"), ("1", "backward"), ("0", "backward")]
    for earlier, later in pairwise(order):
        assert ends[earlier][1] <= ends[later][0]
    assert timeline.ranks == [1]


def test_a_residual_around_a_module_does_not_stretch_its_backward():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = Sleeper(0, 0), Sleeper(0, 0.1)

        def forward(self, x):
            y = self.outer(x)
            return self.inner(y) + Slow.apply(y, 0.1)

    model = Skip()
    with module_spans(model) as timeline:
        model(torch.ones(3)).sum().backward()
    backward = durations(timeline, "backward")
    assert backward["outer"] >= 0.1
    assert backward["inner"] < backward["outer"] / 2


def test_every_call_and_every_backward_has_its_span():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    with module_spans(model, names=["a"]) as timeline:
        y = model["a"](model["b"](model["a"](torch.ones(2, 3)))).sum()
        y.backward(retain_graph=True)
        y.backward()
        with torch.no_grad():
            model["a"](torch.ones(2, 3))
    assert [span.kind for span in timeline.spans].count("forward") == 3
    assert [span.kind for span in timeline.spans].count("backward") == 4
    assert {span.name for span in timeline.spans} == {"a"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_told_from_forward(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    with module_spans(model) as timeline:
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert sorted(span.kind for span in timeline.spans) == ["backward", "forward", "recompute"]


def test_hooks_are_gone_after_an_exception():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(3, 3))
    timeline = Timeline()
    fails = pytest.raises(RuntimeError, match="shapes cannot be multiplied")
    with fails, module_spans(model, timeline=timeline):
        y = model[0](torch.ones(2, 3)).sum()
        model(torch.ones(2, 3))
    seen = len(timeline.spans)
    assert seen >= 3
    y.backward()
    model[1](torch.ones(2, 3))
    assert len(timeline.spans) == seen
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model)


def test_a_name_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match=r"names=\['c'\] are not modules of ModuleDict"):
        with module_spans(nn.ModuleDict({"a": nn.Linear(2, 2)}), names=["a", "c"]):
            pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_spans_are_those_of_the_kernels():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).cuda()
    x = torch.ones(8192, 4096, device="cuda")
    with module_spans(model) as timeline:
        start_s = time.perf_counter()
        model(x).sum().backward()
        launched_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        end_s = time.perf_counter()
    busy_s = timeline.busy("compute")[0]
    assert launched_s / 2 < busy_s
    assert all(start_s - 1e-3 <= s.start_s <= s.end_s <= end_s + 1e-3 for s in timeline.spans)
