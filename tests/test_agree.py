"""What `pdt.comm.agree` finds wrong in tables of ranks that are not there."""

import pytest
import torch

from pdt.comm.agree import (
    pairs_problem,
    pairs_row,
    parts_problem,
    parts_row,
    same_problem,
    same_row,
)


def test_rows_have_one_length_whatever_the_tensor() -> None:
    tensors = [torch.zeros(()), torch.zeros(0), torch.zeros([1] * 64), torch.zeros(2, 3).bool()]
    assert len({len(same_row(tensor)) for tensor in tensors}) == 1
    assert len({len(pairs_row([t] * k, [t], 3)) for k, t in enumerate(tensors)}) == 1


def test_equal_tensors_agree() -> None:
    for tensor in (torch.zeros(()), torch.zeros(0), torch.zeros(2, 3, dtype=torch.bfloat16)):
        assert same_problem([same_row(tensor, root=2)] * 3) is None


@pytest.mark.parametrize(
    ("other", "root", "named"),
    [
        (torch.zeros(3, 2), 0, "rank 1: float32 (3, 2), root 0"),
        (torch.zeros(2, 3).double(), 0, "rank 1: float64 (2, 3), root 0"),
        (torch.zeros(2, 3), 1, "rank 1: float32 (2, 3), root 1"),
    ],
)
def test_shape_dtype_and_root_must_be_alike(other: torch.Tensor, root: int, named: str) -> None:
    problem = same_problem([same_row(torch.zeros(2, 3)), same_row(other, root)])
    assert problem is not None
    assert "rank 0: float32 (2, 3), root 0" in problem
    assert named in problem


@pytest.mark.parametrize("n", range(1, 65))
def test_the_shards_of_every_size_fit(n: int) -> None:
    for numel in (0, 1, n, 5 * n + n // 2):
        whole = torch.zeros(numel)
        table = [parts_row(whole, part) for part in whole.tensor_split(n)]
        assert parts_problem(table) is None
        table[-1][3] += 1
        assert "but the ranks pass" in (parts_problem(table) or "")


def test_an_exchange_fits_if_every_pair_does() -> None:
    def row(rank: int, awaited: int) -> list[int]:
        inputs = [torch.zeros(rank + 2 * target) for target in range(3)]
        outputs = [torch.zeros(source + awaited * rank) for source in range(3)]
        return pairs_row(inputs, outputs, 3)

    assert pairs_problem([row(rank, 2) for rank in range(3)]) is None
    problem = pairs_problem([row(0, 2), row(1, 3), row(2, 2)])
    assert problem is not None
    assert "rank 0 sends float32 2 to rank 1, which awaits float32 3" in problem
