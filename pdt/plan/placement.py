"""Where the states of a training step live: a graph cut between a device and its host. Pure.

Ren et al. 2021, section 3 (arXiv:2101.06840): mixed-precision training with Adam is a graph of four
nodes. What a cut separates crosses the bus once a step. Numbers are bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

Placement = frozenset[str]  # the nodes on the device; the others are on the host
Edge = tuple[str, str]  # from the node that makes it to the one that reads it

# What a node keeps, activations aside. "update" has master parameters and Adam's two states in
# fp32, 4 bytes each; they never part, for an edge between them would carry 4 bytes.
NODES = {"forward-backward": 0, "p16": 2, "g16": 2, "update": 12}
EDGES = {
    ("p16", "forward-backward"): 4,  # 2 for forward, 2 for backward
    ("forward-backward", "g16"): 2,
    ("g16", "update"): 2,
    ("update", "p16"): 2,
}


def placements(nodes: Collection[str]) -> Iterator[Placement]:
    """Every choice of the nodes that are on the device, 2 to the power of their number."""
    for count in range(len(nodes) + 1):
        for chosen in combinations(nodes, count):
            yield frozenset(chosen)


def bus_nbytes(on_device: Collection[str], edges: Mapping[Edge, int]) -> int:
    """What crosses the bus in a step, both directions together."""
    return sum(
        nbytes
        for (source, target), nbytes in edges.items()
        if (source in on_device) != (target in on_device)
    )


def device_nbytes(on_device: Collection[str], nodes: Mapping[str, int]) -> int:
    """What the device keeps."""
    return sum(nodes[name] for name in on_device)


def best_placement(
    nodes: Mapping[str, int], edges: Mapping[Edge, int], pinned: Collection[str], budget: int
) -> Placement:
    """The nodes to keep on a device that has room for `budget`, with those of `pinned` among them.

    That with the least traffic, and of several such, that with the least memory. Raises ValueError
    if no placement fits.
    """
    fitting = [
        on_device
        for on_device in placements(nodes)
        if on_device.issuperset(pinned) and device_nbytes(on_device, nodes) <= budget
    ]
    if not fitting:
        raise ValueError(f"budget={budget}: {sorted(pinned)} alone take more room on the device")
    return min(fitting, key=lambda on: (bus_nbytes(on, edges), device_nbytes(on, nodes)))
