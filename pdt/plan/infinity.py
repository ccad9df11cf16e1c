"""What a model takes that is larger than its devices, and what the way to it must carry. Pure.

Rajbhandari et al. 2021, ZeRO-Infinity, sections 3 and 4 (arXiv:2104.07857), whose numbers the
equations here bear. Layers are transformer layers of `hidden_size` (hd), b samples of s tokens each
run on a device, and `interval` (ci) is the number of layers between two activation checkpoints.
Bytes are counted for Adam in mixed precision, 20 a parameter: 2 + 2 of parameter and gradient in 16
bits; 4 each of master, gradient and two moments in 32.
"""

from __future__ import annotations

from collections.abc import Sequence


def layers_numel(num_layers: int, hidden_size: int) -> int:
    """Parameters of the layers' matrices, 12·nl·hd² (equation 1)."""
    return 12 * num_layers * hidden_size**2


def states_nbytes(num_layers: int, hidden_size: int) -> int:
    """Parameters, gradients and optimizer states, 240·nl·hd² (equation 2)."""
    return 20 * layers_numel(num_layers, hidden_size)


def checkpoints_nbytes(
    batch_size: int, seq_len: int, num_layers: int, hidden_size: int, interval: int = 1
) -> float:
    """The inputs of every `interval` layers, 2·b·s·hd·nl/ci (equation 3)."""
    return 2 * batch_size * seq_len * hidden_size * num_layers / interval


def model_working_nbytes(hidden_size: int) -> int:
    """MSWM: the largest layer, hd to 4hd, with its gradient: 4·hd·4hd (equation 4)."""
    return 4 * hidden_size * 4 * hidden_size


def activation_working_nbytes(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, interval: int = 1
) -> int:
    """AWM: the activations between two checkpoints, 2·b·s·ci·(16hd + 2·heads·s).

    Equation 5, with the two bytes of an element, which it leaves out in print and which Figure 2a
    counts.
    """
    elements = batch_size * seq_len * interval * (16 * hidden_size + 2 * num_heads * seq_len)
    return 2 * elements


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """The share of a device's time in which it computes if it waits for all it needs (equation 6).

    ait: operations for each byte that is carried (arithmetic intensity); bandwidth: bytes per
    second; peak: operations per second. With a device that goes on meanwhile it is the least that
    there is.
    """
    return ait * bandwidth / (ait * bandwidth + peak)


def needed_bandwidth(ait: float, share: float, peak: float) -> float:
    """Bytes per second for this efficiency, equation 6 the other way round; 0 <= share < 1."""
    if not 0 <= share < 1:
        raise ValueError(f"share={share} is not from 0 to 1: no wire is fast enough for all of it")
    return share * peak / (ait * (1 - share))


def ait_of_parameters(seq_len: int, batch_size: int) -> float:
    """Of parameters and gradients: s·b operations a byte (equation 9)."""
    return seq_len * batch_size


def ait_of_states(seq_len: int, batch_size: int) -> float:
    """Of optimizer states, which are read and written: s·b/4 operations a byte (equation 10)."""
    return seq_len * batch_size / 4


def ait_of_checkpoints(hidden_size: int, interval: int = 1) -> float:
    """Of activation checkpoints: 24·hd·ci operations a byte (equation 11)."""
    return 24 * hidden_size * interval


def item_s(read_s: float, use_s: float, write_s: float, num_buffers: int) -> float:
    """Seconds for each of many items that are read, used and written, `num_buffers` at a time.

    No lane works faster than its own part, and an item keeps its buffer for all three.
    """
    if num_buffers < 1:
        raise ValueError(f"num_buffers={num_buffers}: at least one is needed")
    return max(read_s, use_s, write_s, (read_s + use_s + write_s) / num_buffers)


def walk_s(parts_s: Sequence[tuple[float, float, float]], num_buffers: int) -> tuple[float, float]:
    """All seconds and those of stall, for items of (read, use, write) seconds, one by one.

    A read begins when the one before has ended and a buffer is free, which the item `num_buffers`
    before has left once it is written; so with each lane. Stalls are what the user waits.
    """
    if num_buffers < 1:
        raise ValueError(f"num_buffers={num_buffers}: at least one is needed")
    read_end = use_end = write_end = stall = 0.0
    written: list[float] = []
    for i, (read_s, use_s, write_s) in enumerate(parts_s):
        free = written[i - num_buffers] if i >= num_buffers else 0.0
        read_end = max(read_end, free) + read_s
        stall += max(0.0, read_end - use_end)
        use_end = max(use_end, read_end) + use_s
        write_end = max(write_end, use_end) + write_s
        written.append(write_end)
    return write_end, stall
