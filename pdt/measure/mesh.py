"""The picture at the top of a lesson: what each rank holds of each thing."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from pdt.measure.style import FAINT, INK, LOOKS, Look, new_axes, use_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPARE = ("parameters", "gradients", "optimizer states", "activations", "buckets", "other")
_GAP = 0.8  # between the blocks of two kinds, in cells


@use_style()
def mesh(
    ax: "Axes | None",
    held: Mapping[str, Sequence[Sequence[float]]],
    *,
    labels: Mapping[str, Sequence[str]] | None = None,
    ranks: Sequence[str] | None = None,
) -> "Axes":
    """Draw a block per kind: a row for each rank, a cell for each piece of the kind.

    `held[kind][rank][piece]` is the part of the piece that the rank holds: 1 fills the cell, 0
    leaves it empty, and a part between fills as much of its width. A kind without a look of its own
    takes one that is free. `labels[kind]` names the pieces inside their cells, `ranks` the rows
    (default "rank 0"...). Raises ValueError when the rows of
    a kind differ in length, the kinds in their number of ranks, or a part lies outside 0 to 1.
    """
    num_ranks = _checked(held)
    if ax is None:
        ax = new_axes(0.5 + 0.3 * max(num_ranks, 1))
    left, looks = 0.0, _looks(held)
    for kind, rows in held.items():
        texts = (labels or {}).get(kind, [])
        for row, parts in enumerate(rows):
            for piece, part in enumerate(parts):
                text = texts[piece] if piece < len(texts) else ""
                _cell(ax, (left + piece, row), part, looks[kind], text)
        width = max(map(len, rows), default=0)
        ax.text(left + width / 2, -0.2, kind, ha="center", va="bottom", fontsize=9)
        left += width + _GAP
    names = ranks or [f"rank {rank}" for rank in range(num_ranks)]
    ax.set_yticks([row + 0.5 for row in range(num_ranks)], names)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(-0.1, max(left - _GAP, 1) + 0.1)
    ax.set_ylim(num_ranks + 0.1, -0.75)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


def _looks(kinds: Collection[str]) -> dict[str, Look]:
    """A look for each kind: its own, or one that no other kind of the picture has."""
    free = iter([*(name for name in _SPARE if name not in kinds), *["other"] * len(kinds)])
    return {kind: LOOKS[kind if kind in LOOKS else next(free)] for kind in kinds}


def _checked(held: Mapping[str, Sequence[Sequence[float]]]) -> int:
    heights = {kind: len(rows) for kind, rows in held.items()}
    if len(set(heights.values())) > 1:
        raise ValueError(f"held has {heights} rows: give every kind one row for each rank")
    for kind, rows in held.items():
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"held[{kind!r}] has rows of {[len(row) for row in rows]} pieces")
        if outside := [part for row in rows for part in row if not 0 <= part <= 1]:
            raise ValueError(f"held[{kind!r}] has parts {outside} outside 0 to 1")
    return next(iter(heights.values()), 0)


def _cell(ax: "Axes", corner: tuple[float, float], part: float, chosen: Look, text: str) -> None:
    from matplotlib.patches import Rectangle

    x, y = corner[0] + 0.05, corner[1] + 0.09
    width, height = 0.9, 0.82
    ax.add_patch(
        Rectangle((x, y), width, height, facecolor="white", edgecolor=FAINT, linewidth=0.8)
    )
    if part > 0:
        ax.add_patch(Rectangle((x, y), width * part, height, **chosen.patch()))
    if text:
        covered = part > 0.6
        box = {"facecolor": chosen.color, "edgecolor": "none", "pad": 0.6}
        ax.text(
            x + width / 2,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color=chosen.on if covered else INK,
            bbox=box if covered and chosen.hatch else None,
        )
