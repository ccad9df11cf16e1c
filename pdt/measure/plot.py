"""The course's pictures: timelines, memory bars and curves, meshes, measured against predicted.

Each draws on the axes it is given, or on a new figure of notebook width, and returns the axes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pdt.measure.lanes import timeline
from pdt.measure.mesh import mesh
from pdt.measure.stats import Summary
from pdt.measure.storages import KINDS
from pdt.measure.style import (
    INK,
    LOOKS,
    PAPER,
    WIDTH,
    Look,
    legend,
    look,
    new_axes,
    scaled,
    text_nbytes,
    use_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pdt.buckets import Bucket

__all__ = ["buckets", "curve", "memory_bars", "memory_curve", "mesh", "timeline", "use_style"]

_NEIGHBOURS = (Look("#2a6fbb"), Look("#c9dcf2", "", INK))  # parameters of a bucket, in turn


@use_style()
def memory_bars(
    ax: "Axes | None",
    bars: Mapping[str, Mapping[str, float]],
    reference: Mapping[str, Mapping[str, float]] | None = None,
) -> "Axes":
    """Draw one stacked bar per label, its bytes by kind from the lasting to the passing.

    `reference` holds a paper's bytes for some of the labels, drawn as dashed outlines around the
    measured bar, kind by kind.
    """
    ax = ax or new_axes(0.8 + 0.36 * max(len(bars), 1))
    ghosts = reference or {}
    largest = max((sum(b.values()) for b in [*bars.values(), *ghosts.values()]), default=0)
    divisor, unit = scaled(largest)
    for row, (label, kinds) in enumerate(bars.items()):
        end = _stack(ax, row, kinds, divisor)
        ghost_end = _outline(ax, row, ghosts.get(label, {}), divisor)
        total = text_nbytes(sum(kinds.values()))
        ax.annotate(
            total, (max(end, ghost_end), row), (4, 0), textcoords="offset points", va="center"
        )
    ax.set_yticks(range(len(bars)), list(bars))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(bars) - 0.5, -0.6)
    ax.set_xlim(0, largest / divisor * 1.13 or 1)
    ax.set_xlabel(unit if not ghosts else f"{unit}, dashed: as published")
    ax.grid(axis="x")
    ax.spines["left"].set_visible(False)
    legend(ax, [kind for kinds in bars.values() for kind, nbytes in kinds.items() if nbytes])
    return ax


def _stack(ax: "Axes", row: int, kinds: Mapping[str, float], divisor: float) -> float:
    end = 0.0
    for kind in sorted(kinds, key=_place):
        width = kinds[kind] / divisor
        if width:
            ax.barh(row, width, 0.62, left=end, **look(kind).patch())
        end += width
    return end


def _outline(ax: "Axes", row: int, kinds: Mapping[str, float], divisor: float) -> float:
    end = 0.0
    for kind in sorted(kinds, key=_place):
        width = kinds[kind] / divisor
        ax.barh(row, width, 0.82, left=end, fill=False, edgecolor=PAPER, linestyle=(0, (3, 2)))
        end += width
    return end


def _place(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


@use_style()
def memory_curve(ax: "Axes | None", timeline: Sequence[tuple[float, Mapping[str, int]]]) -> "Axes":
    """Draw a ledger's `timeline`: live bytes by kind, stacked, over ms since its first event."""
    ax = ax or new_axes(2.4)
    times_ms = [(time_s - timeline[0][0]) * 1e3 for time_s, _ in timeline]
    largest = max((sum(totals.values()) for _, totals in timeline), default=0)
    divisor, unit = scaled(largest)
    used = [kind for kind in KINDS if any(totals[kind] for _, totals in timeline)]
    floor = [0.0] * len(timeline)
    for kind in used:
        ceiling = [
            below + totals[kind] / divisor
            for below, (_, totals) in zip(floor, timeline, strict=True)
        ]
        ax.fill_between(
            times_ms, floor, ceiling, step="post", **look(kind).patch() | {"linewidth": 0}
        )
        floor = ceiling
    if floor:
        peak = max(floor)
        at = times_ms[floor.index(peak)]
        side = "left" if at < times_ms[-1] / 2 else "right"
        ax.annotate(
            f"peak {text_nbytes(largest)}", (at, peak), (0, 2), textcoords="offset points", ha=side
        )
    ax.set_ylim(0, largest / divisor * 1.12 or 1)
    ax.set_xlim(0, max(times_ms, default=1) or 1)
    ax.set_xlabel("ms")
    ax.set_ylabel(unit)
    legend(ax, used)
    return ax


@use_style()
def curve(
    ax: "Axes | None",
    x: Sequence[float],
    y: Sequence["float | Summary"],
    *,
    model: Callable[[float], float] | None = None,
    paper: tuple[Sequence[float], Sequence[float]] | None = None,
    label: str = "measured",
) -> "Axes":
    """Draw measured points on log axes, with the model's line and the paper's points.

    A `Summary` among `y` shows its 10th to 90th percentile. `model` maps x to y; `paper` is a pair
    of sequences. Set the axes' labels and, where it fits, linear scales on what is returned.
    """
    ax = ax or new_axes(2.8)
    ax.set_xscale("log")
    ax.set_yscale("log")
    middles = [value.median if isinstance(value, Summary) else value for value in y]
    below = [value.median - value.low if isinstance(value, Summary) else 0.0 for value in y]
    above = [value.high - value.median if isinstance(value, Summary) else 0.0 for value in y]
    color = LOOKS["parameters"].color
    ax.errorbar(
        x, middles, yerr=[below, above], fmt="o", color=color, capsize=2, label=label, zorder=3
    )
    if model is not None:
        reach = [*x, *(paper[0] if paper else [])]
        steps = [min(reach) * (max(reach) / min(reach)) ** (i / 100) for i in range(101)]
        ax.plot(steps, [model(step) for step in steps], color=INK, lw=1.2, label="model")
    if paper is not None:
        ax.plot(*paper, "D", mfc="none", mec=PAPER, label="as published")
    ax.grid(color="#e8e8e8")
    ax.legend()
    return ax


@use_style()
def buckets(
    ax: "Axes | None", plan: "Sequence[Bucket]", names: Sequence[str] | None = None
) -> "Axes":
    """Draw a row per bucket, the first to be sent on top: a cell per parameter, to scale in bytes.

    `names[i]` is written into the cell of parameter i (its position in the list that was assigned;
    by default that number) where there is room. A row ends with the bucket's bytes and dtype.
    """
    ax = ax or new_axes(0.6 + 0.3 * max(len(plan), 1))
    largest = max((bucket.nbytes for bucket in plan), default=0)
    divisor, unit = scaled(largest)
    room = 0.7 * WIDTH / max(largest / divisor, 1)  # inches for one unit, about
    for row, bucket in enumerate(plan):
        bounds = [offset * bucket.dtype.itemsize / divisor for offset in bucket.offsets]
        for place, param in enumerate(bucket.params):
            left, width = bounds[place], bounds[place + 1] - bounds[place]
            chosen = _NEIGHBOURS[place % 2]
            ax.barh(row, width, 0.7, left=left, **chosen.patch())
            text = names[param] if names else str(param)
            if width * room > 0.1 + 0.065 * len(text):
                middle = left + width / 2
                ax.text(middle, row, text, color=chosen.on, fontsize=8, ha="center", va="center")
        text = f"{text_nbytes(bucket.nbytes)} {str(bucket.dtype).removeprefix('torch.')}"
        ax.annotate(text, (bounds[-1], row), (4, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(plan)), [f"bucket {bucket.index}" for bucket in plan])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(plan), 1) - 0.5, -0.5)
    ax.set_xlim(0, largest / divisor * 1.25 or 1)
    ax.set_xlabel(unit)
    ax.spines["left"].set_visible(False)
    return ax
