"""Figures show every part of what they are given, small, in one style, and also in grey."""

import io
from itertools import pairwise

import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  # after the choice of a backend

from pdt.buckets import assign_buckets  # noqa: E402
from pdt.measure import plot, stats, style  # noqa: E402
from pdt.measure.storages import KINDS  # noqa: E402
from pdt.measure.timeline import Span, Timeline  # noqa: E402


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    pyplot.close("all")


def png(ax):
    buffer = io.BytesIO()
    ax.figure.savefig(buffer, format="png")
    return buffer.getvalue()


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def luminance(color):
    red, green, blue = matplotlib.colors.to_rgb(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def two_ranks():
    spans = []
    for rank in range(2):
        spans += [
            Span("block", 10.0, 10.2, "compute", "forward", rank),
            Span("block", 10.2, 10.6, "compute", "backward", rank),
            Span("all_reduce", 10.4, 10.8, "send", "all_reduce", rank, 8),
            Span("all_reduce", 10.4, 10.8, "recv", "all_reduce", rank, 8),
            Span("mine", 10.9, 10.9, "compute", "a kind of my own", rank),
        ]
    return Timeline(spans)


def test_a_timeline_shows_ranks_lanes_kinds_and_what_is_hidden():
    ax = two_ranks().plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert legend(ax) == ["forward", "backward", "all_reduce", "a kind of my own"]
    assert texts(ax).count("50%\nhidden") == 2
    assert texts(ax).count("send") == 2
    assert texts(ax).count("block") == 4
    assert ax.get_xlim() == pytest.approx((0, 900))
    assert len(png(ax)) < 60_000
    assert ax.figure.get_size_inches()[0] == style.WIDTH


def test_spans_of_a_lane_that_overlap_do_not_cover_each_other():
    spans = [Span(name, start, start + 2, "send", name) for name, start in (("a", 0), ("b", 1))]
    ax = Timeline(spans).plot()
    extents = [
        (path.vertices[:, 1].min(), path.vertices[:, 1].max())
        for collection in ax.collections
        for path in collection.get_paths()
    ]
    (_, upper), (lower, _) = sorted(extents)
    assert upper <= lower + 1e-9


def test_memory_bars_stack_every_kind_and_outline_the_paper():
    bars = {
        "DDP": {"parameters": 2e9, "gradients": 2e9, "activations": 0},
        "ZeRO-1": {"gradients": 1e9, "parameters": 2e9},
    }
    ax = plot.memory_bars(None, bars, {"DDP": {"parameters": 2e9, "gradients": 3e9}})
    assert legend(ax) == ["parameters", "gradients"]
    assert texts(ax) == ["4.00 GB", "3.00 GB"]
    filled = [p for p in ax.patches if p.get_fill()]
    assert [(p.get_x(), p.get_width()) for p in filled] == [(0, 2), (2, 2), (0, 2), (2, 1)]
    outlines = [p for p in ax.patches if not p.get_fill()]
    assert [(p.get_x(), p.get_width()) for p in outlines] == [(0, 2), (2, 3)]
    assert len(png(ax)) < 60_000


def test_a_memory_curve_names_the_peak():
    totals = [dict.fromkeys(KINDS, 0) | {"parameters": 100, "other": n} for n in (0, 1900, 400)]
    ax = plot.memory_curve(None, [(5.0 + i, t) for i, t in enumerate(totals)])
    assert texts(ax) == ["peak 2.00 kB"]
    assert legend(ax) == ["parameters", "other"]
    assert ax.get_xlim() == (0, 2000)


def test_a_mesh_fills_the_part_that_a_rank_holds():
    held = {"parameters": [[1, 1], [1, 1]], "gradients": [[1, 0], [0, 0.5]]}
    ax = plot.mesh(None, held, labels={"gradients": ["w", "b"]})
    cells = [p for p in ax.patches if p.get_facecolor()[:3] == (1, 1, 1)]
    filled = [p for p in ax.patches if p.get_facecolor()[:3] != (1, 1, 1)]
    assert len(cells) == 8
    assert [p.get_width() / 0.9 for p in filled] == pytest.approx([1, 1, 1, 1, 1, 0.5])
    assert texts(ax) == ["parameters", "w", "b", "w", "b", "gradients"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]


def test_kinds_without_a_look_are_told_apart_in_a_mesh():
    held = {"samples": [[1]], "gradients": [[1]], "sums": [[1]]}
    ax = plot.mesh(None, held)
    filled = [p.get_facecolor() for p in ax.patches if p.get_facecolor()[:3] != (1, 1, 1)]
    assert len(set(filled)) == 3


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"a": [[1]], "b": [[1], [1]]}, "one row for each rank"),
        ({"a": [[1], [1, 1]]}, r"rows of \[1, 2\] pieces"),
        ({"a": [[1.5]]}, r"parts \[1.5\] outside 0 to 1"),
    ],
)
def test_a_crooked_mesh_is_refused(held, says):
    with pytest.raises(ValueError, match=says):
        plot.mesh(None, held)


def test_a_curve_shows_points_model_and_paper():
    values = [stats.summary([1.0, 2.0, 3.0]), 4.0]
    ax = plot.curve(None, [1, 10], values, model=lambda x: 2 * x, paper=([1, 100], [1, 9]))
    assert sorted(legend(ax)) == ["as published", "measured", "model"]
    model = next(line for line in ax.lines if line.get_label() == "model")
    assert list(model.get_ydata()[[0, -1]]) == pytest.approx([2, 200])
    (points,) = ax.containers
    assert list(points.lines[0].get_ydata()) == [2, 4]
    bars = points.lines[2][0].get_segments()
    assert bars[0][:, 1].tolist() == pytest.approx([1.2, 2.8])


def test_a_plan_of_buckets_shows_each_parameter_to_scale_in_its_row():
    params = [torch.zeros(n) for n in (250, 500, 1, 249)]
    plan = assign_buckets(params, bucket_cap_mb=1000 / 2**20, first_bucket_mb=1000 / 2**20)
    ax = plot.buckets(None, plan, ["first", "second", "third", "fourth"])
    cells = [(p.get_y() + p.get_height() / 2, p.get_x(), p.get_width()) for p in ax.patches]
    wanted = [(0, 0, 0.996), (0, 0.996, 0.004), (1, 0, 2), (2, 0, 1)]
    assert [pytest.approx(cell) for cell in wanted] == cells
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["bucket 0", "bucket 1", "bucket 2"]
    written = ["fourth", "1.00 kB float32", "second", "2.00 kB float32", "first", "1.00 kB float32"]
    assert texts(ax) == written
    assert len(png(ax)) < 60_000


def test_neighbours_in_a_bucket_are_told_apart_in_grey():
    ax = plot.buckets(None, assign_buckets([torch.zeros(9), torch.zeros(9)]))
    one, other = (luminance(p.get_facecolor()[:3]) for p in ax.patches)
    assert abs(one - other) > 0.3
    assert texts(ax)[:2] == ["1", "0"]


def test_nothing_to_show_is_an_empty_picture():
    for ax in (
        plot.buckets(None, []),
        Timeline().plot(),
        plot.memory_bars(None, {}),
        plot.memory_curve(None, []),
        plot.mesh(None, {}),
    ):
        assert png(ax)[:4] == b"\x89PNG"


def test_the_kinds_of_memory_are_told_apart_in_grey():
    shades = [luminance(style.look(kind).color) for kind in KINDS]
    assert shades == sorted(shades)
    for kind, following in pairwise(KINDS):
        one, other = style.look(kind), style.look(following)
        assert luminance(other.color) - luminance(one.color) > 0.05
        assert one.hatch != other.hatch


def test_pictures_are_drawn_on_the_axes_given_and_the_style_ends():
    before = dict(matplotlib.rcParams)
    _figure, (left, right) = pyplot.subplots(1, 2)
    assert plot.timeline(left, two_ranks()) is left
    assert plot.mesh(right, {"parameters": [[1]]}) is right
    with plot.use_style():
        assert matplotlib.rcParams["axes.spines.top"] is False
    assert dict(matplotlib.rcParams) == before
    assert len(pyplot.get_fignums()) == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (16.38e9, "16.4 GB"), (1.2e14, "120 TB")],
)
def test_bytes_are_written_in_three_digits(nbytes, text):
    assert style.text_nbytes(nbytes) == text


def test_what_the_first_figure_switches_on_stays_on() -> None:
    """A notebook's first figure makes matplotlib interactive, perhaps inside the style."""
    import matplotlib

    before = matplotlib.is_interactive()
    try:
        for wanted in (True, False):
            with plot.use_style():
                matplotlib.interactive(wanted)
            assert matplotlib.is_interactive() == wanted
    finally:
        matplotlib.interactive(before)
