"""The look of every figure: one colour and hatch per kind, told apart in grey as well.

The kinds of memory go from dark to light in the order in which they are stacked, and neighbours
differ in hatch; so a stack or a timeline printed in grey keeps its parts distinct.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.0  # inches: a notebook's column
INK = "#222222"
FAINT = "#b8b8b8"
PAPER = "#c1121f"  # what a paper printed: outlines and open marks, never a filled area


@dataclass(frozen=True)
class Look:
    """Fill, hatch and the colour of hatch, edge and text on it."""

    color: str
    hatch: str = ""
    on: str = "white"

    def patch(self) -> dict[str, Any]:
        """Keyword arguments for a matplotlib patch."""
        return {
            "facecolor": self.color,
            "hatch": self.hatch,
            "edgecolor": self.on,
            "linewidth": 0.6,
        }


LOOKS = {
    # memory, from what stays to what passes
    "parameters": Look("#1d2f6f"),
    "gradients": Look("#2a6fbb", "////"),
    "optimizer states": Look("#3fa796"),
    "activations": Look("#f0a63c", "....", INK),
    "buckets": Look("#f7d58b", "xxxx", "#8a6d1f"),
    "other": Look("#e4e4e4", "", "#777777"),
    # compute
    "forward": Look("#4f8fd6"),
    "backward": Look("#1d2f6f"),
    "recompute": Look("#a9c9ee", "////", "#1d2f6f"),
    "optimizer": Look("#3fa796", "\\\\\\\\"),
    # communication
    "reduce_scatter": Look("#a8341c", "////"),
    "all_reduce": Look("#d95f2b"),
    "all_to_all": Look("#e07f4f", "xxxx"),
    "all_gather": Look("#f0a63c", "....", INK),
    "broadcast": Look("#f7d58b", "", "#8a6d1f"),
    "reduce": Look("#f7d58b", "////", "#8a6d1f"),
    "gather": Look("#f3e3bd", "....", "#8a6d1f"),
    "scatter": Look("#f3e3bd", "", "#8a6d1f"),
    "send": Look("#5c2f75"),
    "recv": Look("#c6a5d6", "....", "#5c2f75"),
    "barrier": Look("#777777"),
}


def look(kind: str) -> Look:
    """The look of this kind; a kind without one of its own looks like "other"."""
    return LOOKS.get(kind, LOOKS["other"])


@contextmanager
def use_style() -> Iterator[None]:
    """Draw and save figures in the course's style inside the block; small files, no timestamps."""
    import matplotlib

    settings: Any = {
        "figure.figsize": (WIDTH, 2.8),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 100,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#e8e8e8",
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "hatch.linewidth": 0.5,
        "lines.markersize": 5,
        "svg.hashsalt": "pdt",
    }
    interactive = matplotlib.is_interactive()
    try:
        with matplotlib.rc_context(settings):
            try:
                yield
            finally:
                interactive = matplotlib.is_interactive()
    finally:
        # A notebook's first figure switches this on; undone, no later figure would be shown.
        matplotlib.interactive(interactive)


def scaled(nbytes: float) -> tuple[float, str]:
    """The divisor and the name of the decimal unit in which `nbytes` is 1 to 1,000."""
    for divisor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= divisor:
            return divisor, unit
    return 1.0, "B"


def text_nbytes(nbytes: float) -> str:
    """`nbytes` in three digits and a decimal unit: 16.4 GB."""
    divisor, unit = scaled(nbytes)
    number = nbytes / divisor
    digits = 0 if divisor == 1 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{digits}f} {unit}"


def new_axes(height: float) -> "Axes":
    """Axes on a new figure of notebook width and `height` inches."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, height))[1]


def legend(ax: "Axes", kinds: Sequence[str]) -> None:
    """A legend above the axes, of the kinds that occur, in the order of `LOOKS`."""
    from matplotlib.patches import Patch

    order = [kind for kind in LOOKS if kind in kinds]
    order += [kind for kind in dict.fromkeys(kinds) if kind not in LOOKS]
    handles = [Patch(label=kind, **look(kind).patch()) for kind in order]
    if handles:
        width = sum(0.36 + 0.058 * len(kind) for kind in order)  # inches, in one row
        room = 1.1 * ax.get_window_extent().width / ax.figure.dpi  # layout widens axes, later
        ax.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=math.ceil(len(order) / math.ceil(width / room)),
            borderaxespad=0.2,
            handlelength=1.3,
            handletextpad=0.4,
            columnspacing=1.0,
        )
