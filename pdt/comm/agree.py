"""What each rank tells the others about its tensors before a collective, and whether that fits.

Pure: a row of integers describes one rank's tensors, and a table holds one row for each rank. A
`..._problem` function reads the same table on every rank, so every rank finds the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdt.comm.schedule import shard_numel

Row = list[int]
MAX_DIM = 64  # of a torch tensor; rows must be of one length on all ranks
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def _name(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.")


def same_row(tensor: Tensor, root: int = 0) -> Row:
    """Root, dtype and shape, which all ranks must pass alike."""
    padding = [0] * (MAX_DIM - tensor.dim())
    return [root, DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]


def same_problem(table: Sequence[Row]) -> str | None:
    """None if all rows are alike and the root is one of the ranks, else who passes what."""
    n, root = len(table), table[0][0]
    if any(row != table[0] for row in table):
        held = [
            f"rank {r}: {_name(row[1])} {tuple(row[3 : 3 + row[2]])}, root {row[0]}"
            for r, row in enumerate(table)
        ]
        return f"ranks must pass equal shapes, dtypes and roots, but pass {'; '.join(held)}"
    if not 0 <= root < n:
        return f"root must be a rank of the group, 0 to {n - 1}, got {root}"
    return None


def parts_row(whole: Tensor, part: Tensor) -> Row:
    """Dtypes and sizes of the tensor that all ranks hold alike and of this rank's shard of it."""
    codes = DTYPES.index(whole.dtype), DTYPES.index(part.dtype)
    return [*codes, whole.numel(), part.numel()]


def parts_problem(table: Sequence[Row]) -> str | None:
    """None if the wholes are alike and rank r's part is its shard, else who holds what."""
    n, (code, _, numel, _) = len(table), table[0]
    sizes = [shard_numel(numel, r, n) for r in range(n)]
    if all(row == [code, code, numel, size] for row, size in zip(table, sizes, strict=True)):
        return None
    held = [
        f"rank {r}: {_name(row[0])} {row[2]} and {_name(row[1])} {row[3]}"
        for r, row in enumerate(table)
    ]
    return (
        f"{numel} elements on {n} ranks make shards of {sizes} elements, all of one dtype, "
        f"but the ranks pass (whole and shard) {'; '.join(held)}"
    )


def pairs_row(inputs: Sequence[Tensor], outputs: Sequence[Tensor], n: int) -> Row:
    """Number, dtypes and sizes of what this rank sends to and awaits from each of `n` ranks."""
    row = [len(inputs), len(outputs)]
    for tensors in (inputs, outputs):
        pairs = [(DTYPES.index(t.dtype), t.numel()) for t in tensors[:n]]
        pairs += [(0, -1)] * (n - len(pairs))
        row += [number for pair in pairs for number in pair]
    return row


def pairs_problem(table: Sequence[Row]) -> str | None:
    """None if rank i's input j is as large and of the dtype that rank j awaits from i."""
    n = len(table)
    for rank, (num_inputs, num_outputs, *_) in enumerate(table):
        if (num_inputs, num_outputs) != (n, n):
            return (
                f"{n} ranks need {n} inputs and {n} outputs each, "
                f"but rank {rank} passes {num_inputs} and {num_outputs}"
            )
    for source in range(n):
        for target in range(n):
            sent = table[source][2 + 2 * target :][:2]
            awaited = table[target][2 + 2 * n + 2 * source :][:2]
            if sent != awaited:
                return (
                    f"rank {source} sends {_name(sent[0])} {sent[1]} to rank {target}, "
                    f"which awaits {_name(awaited[0])} {awaited[1]}: make the sizes equal"
                )
    return None
