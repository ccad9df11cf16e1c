"""The picture of a timeline: a block per rank, a row per lane."""

from typing import TYPE_CHECKING, Any

from pdt.measure import intervals
from pdt.measure.style import legend, look, new_axes, use_style
from pdt.measure.trace import LANES, USUAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pdt.measure.timeline import Timeline

_HEIGHTS = {"compute": 3.0, "host": 2.0}  # of a lane, where a transfer's is 1
_BLOCK, _GAP = 0.95, 0.035  # of a rank's block, and between its lanes
_CHARACTER = 0.0118  # width of a letter in a bar, as a part of the axes


@use_style()
def timeline(ax: "Axes | None", timeline: "Timeline") -> "Axes":
    """Draw all spans over milliseconds since the first: a block per rank, a row per lane.

    At the right of each rank stands how much of its transfers compute has hidden. Spans of one lane
    that overlap share its height.
    """
    ranks, lanes = timeline.ranks, _places(timeline)
    ax = ax or new_axes(0.75 + 0.16 * len(lanes) * max(len(ranks), 1))
    start_s = min((span.start_s for span in timeline.spans), default=0.0)
    length_s = max((span.end_s for span in timeline.spans), default=0.0) - start_s
    for row, rank in enumerate(ranks):
        for lane, (offset, height) in lanes.items():
            _draw_lane(ax, timeline, (rank, lane), (row + offset, height), (start_s, length_s))
            ax.text(-0.006, row + offset + height / 2, lane, **_small(ax, ha="right"))
        ax.text(1.01, row + 0.45, _hidden(timeline, rank), **_small(ax, ha="left"))
    ax.set_yticks([row + 0.45 for row in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    ax.tick_params(axis="y", length=0, pad=38)
    ax.set_ylim(max(len(ranks), 1) + 0.02, -0.08)
    ax.set_xlim(0, max(length_s * 1e3, 1e-9))
    ax.set_xlabel("ms")
    ax.spines["left"].set_visible(False)
    legend(ax, [span.kind for span in timeline.spans])
    return ax


def _places(timeline: "Timeline") -> "dict[str, tuple[float, float]]":
    """Offset and height in its block of each lane: the usual ones, or those that are in use."""
    used = {span.lane for span in timeline.spans}
    lanes = USUAL if used <= set(USUAL) else [lane for lane in LANES if lane in used]
    heights = [_HEIGHTS.get(lane, 1.0) for lane in lanes]
    unit = (_BLOCK - _GAP * (len(lanes) - 1)) / sum(heights)
    places, offset = {}, 0.0
    for lane, height in zip(lanes, heights, strict=True):
        places[lane] = (offset, height * unit)
        offset += height * unit + _GAP
    return places


def _draw_lane(
    ax: "Axes",
    timeline: "Timeline",
    where: tuple[int, str],
    place: tuple[float, float],
    window_s: tuple[float, float],
) -> None:
    (top, height), (start_s, length_s) = place, window_s
    spans = sorted(s for s in timeline.spans if (s.rank, s.lane) == where)
    ax.axhspan(top, top + height, color="#f6f6f6", zorder=0)
    numbers = intervals.tracks([(s.start_s, s.end_s) for s in spans])
    step = height / (max(numbers, default=0) + 1)
    for kind in dict.fromkeys(span.kind for span in spans):
        for number in sorted(set(numbers)):
            bars = [
                ((s.start_s - start_s) * 1e3, s.duration_s * 1e3)
                for s, own in zip(spans, numbers, strict=True)
                if s.kind == kind and own == number
            ]
            ax.broken_barh(bars, (top + number * step, step), **look(kind).patch())
    if where[1] in _HEIGHTS and step == height:
        for span in spans:
            room = span.duration_s / length_s if length_s else 0.0
            if len(span.name) * _CHARACTER < room:
                middle = (span.start_s + span.end_s) / 2 - start_s
                _label(ax, middle * 1e3, top + height / 2, span.name, span.kind)


def _label(ax: "Axes", x: float, y: float, text: str, kind: str) -> None:
    chosen = look(kind)
    box = {"facecolor": chosen.color, "edgecolor": "none", "pad": 0.8} if chosen.hatch else None
    ax.text(x, y, text, ha="center", va="center", fontsize=7, color=chosen.on, bbox=box)


def _hidden(timeline: "Timeline", rank: int) -> str:
    hidden, exposed = timeline.overlap()[rank], timeline.exposed()[rank]
    computes = any(span.rank == rank and span.lane == "compute" for span in timeline.spans)
    return f"{hidden / (hidden + exposed):.0%}\nhidden" if computes and hidden + exposed else ""


def _small(ax: "Axes", ha: str) -> dict[str, Any]:
    return {
        "transform": ax.get_yaxis_transform(),
        "ha": ha,
        "va": "center",
        "fontsize": 7,
        "color": "#777777",
    }
