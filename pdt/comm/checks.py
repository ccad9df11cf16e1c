"""What the ranks of a collective tell each other first: one all-gather of a few hundred bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm import agree
from pdt.comm.messages import Group, place


def check_same(tensor: Tensor, group: Group = None, root: int = 0) -> None:
    """ValueError on every rank unless all pass the same shape, dtype and root."""
    _agree(agree.same_row(tensor, root), agree.same_problem, tensor.device, group)


def check_parts(whole: Tensor, part: Tensor, group: Group = None) -> None:
    """ValueError on every rank unless the wholes are alike and each part is its rank's shard."""
    _agree(agree.parts_row(whole, part), agree.parts_problem, whole.device, group)


def check_pairs(inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: Group = None) -> None:
    """ValueError on every rank unless each output is as large as the input that it awaits."""
    row = agree.pairs_row(inputs, outputs, place(group)[1])
    device = inputs[0].device if len(inputs) else torch.device("cpu")
    _agree(row, agree.pairs_problem, device, group)


def _agree(
    row: agree.Row,
    problem: Callable[[Sequence[agree.Row]], str | None],
    device: torch.device,
    group: Group,
) -> None:
    mine = torch.tensor(row, device=device)
    table = [torch.empty_like(mine) for _ in range(place(group)[1])]
    dist.all_gather(table, mine, group=group)
    if found := problem([their.tolist() for their in table]):
        raise ValueError(found)
