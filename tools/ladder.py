"""Draws the README's picture: what each of four ranks holds, lesson by lesson.

python -m tools.ladder    writes docs/ladder.png
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "ladder.png"
RANKS = 4
KINDS = ("parameters", "gradients", "optimizer states", "activations")
ALL = [[1.0] * RANKS] * RANKS
OWN = [[float(piece == rank) for piece in range(RANKS)] for rank in range(RANKS)]
NONE = [[0.0] * RANKS] * RANKS
ONE = [[1.0] * RANKS, *NONE[1:]]  # one rank holds all, and is alone

RUNGS = {  # what each rank holds of each of KINDS
    "01  one device": (ONE,) * 4,
    "04-08  data parallel (DDP)": (ALL, ALL, ALL, OWN),
    "09  ZeRO-1: states are sharded": (ALL, ALL, OWN, OWN),
    "10  ZeRO-2: gradients too": (ALL, OWN, OWN, OWN),
    "11  ZeRO-3: parameters too": (OWN, OWN, OWN, OWN),
    "12  activations recomputed, or on the host": (ONE, ONE, ONE, NONE),
    "13-14  gradients, states on the host, on disk": (ONE, NONE, NONE, ONE),
    "15  tensor parallel: slices of each layer": (OWN, OWN, OWN, ALL),
    "17  pipeline: a stage of layers each": (OWN, OWN, OWN, OWN),
    "19  long context: a part of the sequence each": (ALL, ALL, ALL, OWN),
}


def draw(path: Path) -> None:
    """One panel per rung, ranks from top to bottom, the pieces of each kind from left to right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from pdt.measure import plot

    with plot.use_style():
        figure, axes = plt.subplots(-(-len(RUNGS) // 2), 2, figsize=(9, 8))
        for ax, (title, held) in zip(axes.flat, RUNGS.items(), strict=True):
            plot.mesh(ax, dict(zip(KINDS, held, strict=True)))
            ax.set_title(title, fontweight="bold", pad=9)
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    draw(PICTURE)
