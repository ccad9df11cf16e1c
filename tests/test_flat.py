"""`pdt.flat`: views keep shape, strides and values, whatever the tensors look like in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdt.flat import ShardLayout, flatten, is_dense, offsets, unflatten, view_like


def numbered(*shape: int) -> Tensor:
    """Every element another number."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


DENSE = {
    "contiguous": numbered(3, 4),
    "transposed": numbered(3, 4).t(),
    "channels_last": numbered(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": numbered(2, 3, 4).permute(2, 0, 1),
    "number": torch.tensor(7.0),
    "empty": torch.empty(0),
    "empty with sizes": torch.empty(3, 0, 2),
    "empty slice": numbered(3, 4)[:, 4:],
    "sizes of one": numbered(1, 5, 1),
    "one row of many": numbered(4, 5)[2:3],
    "expanded by one": numbered(5).expand(1, 5),
}
GAPS = {
    "expanded": numbered(3, 1).expand(3, 4),
    "number expanded": torch.tensor(7.0).expand(2),
    "every other": numbered(8)[::2],
    "columns": numbered(4, 6)[:, 1:4],
    "overlapping": numbered(6).as_strided((3, 3), (1, 1)),
}
ALL = {**DENSE, **GAPS}
TENSORS = pytest.mark.parametrize("tensor", list(ALL.values()), ids=list(ALL))


@pytest.mark.parametrize("name", ALL)
def test_dense_means_without_gaps_or_overlaps(name: str) -> None:
    assert is_dense(ALL[name]) is (name in DENSE)


@TENSORS
def test_a_view_has_the_shape_and_holds_what_is_copied_into_it(tensor: Tensor) -> None:
    flat = torch.full((tensor.numel() + 5,), -1.0)
    view = view_like(flat, 2, tensor)
    view.copy_(tensor)
    assert torch.equal(view, tensor)
    assert flat[:2].tolist() + flat[2 + tensor.numel() :].tolist() == [-1.0] * 5
    assert sorted(flat[2:-3].tolist()) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize("tensor", list(DENSE.values()), ids=list(DENSE))
def test_a_view_has_the_strides_of_a_dense_tensor(tensor: Tensor) -> None:
    assert view_like(torch.empty(tensor.numel() + 1), 1, tensor).stride() == tensor.stride()


@pytest.mark.parametrize("tensor", list(GAPS.values()), ids=list(GAPS))
def test_a_view_of_a_tensor_with_gaps_is_contiguous(tensor: Tensor) -> None:
    assert view_like(torch.empty(tensor.numel()), 0, tensor).is_contiguous()


def test_the_elements_of_a_dense_tensor_come_in_the_order_of_its_memory() -> None:
    assert flatten([numbered(3, 4).t(), numbered(2)]).tolist() == [*range(1, 13), 1, 2]


def test_flatten_and_unflatten_are_inverse() -> None:
    tensors = list(ALL.values())
    flat = flatten(tensors)
    parts = unflatten(flat, tensors)
    assert all(torch.equal(part, t) for part, t in zip(parts, tensors, strict=True))
    assert torch.equal(flatten(parts), flat)


def test_flatten_copies_and_unflatten_does_not() -> None:
    tensor = numbered(3, 4)
    flat = flatten([tensor])
    flat.zero_()
    assert tensor.sum() == 78
    (part,) = unflatten(flat, [tensor])
    part[1, 2] = 5
    assert flat.sum() == 5


def test_a_part_of_a_larger_buffer_can_be_flat() -> None:
    buffer = torch.zeros(20)
    for view in unflatten(buffer[4:16], [numbered(2, 3).t(), numbered(6)]):
        view.fill_(1)
    assert buffer.tolist() == [0] * 4 + [1] * 12 + [0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_every_dtype_travels_unchanged(dtype: torch.dtype) -> None:
    tensor = numbered(3, 4).to(dtype).t()
    flat = flatten([tensor])
    assert flat.dtype == dtype
    assert torch.equal(unflatten(flat, [tensor])[0], tensor)


def test_offsets_are_where_parts_begin_and_the_end() -> None:
    assert offsets([3, 0, 4]) == [0, 3, 3, 7]
    assert offsets([]) == [0]


def test_one_flat_tensor_has_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is .*float64 on cpu, tensor 0"):
        flatten([numbered(2), numbered(2).double()])
    with pytest.raises(ValueError, match="on meta"):
        flatten([numbered(2), torch.empty(2, device="meta")])
    with pytest.raises(ValueError, match="one tensor or more"):
        flatten([])


@pytest.mark.parametrize("flat", [torch.empty(5), torch.empty(7), torch.empty(2, 3)])
def test_tensors_that_do_not_fill_the_flat_one_are_refused(flat: Tensor) -> None:
    with pytest.raises(ValueError, match="6 elements do not fill"):
        unflatten(flat, [numbered(2, 3)])


def test_a_flat_tensor_with_gaps_is_refused() -> None:
    every_other = numbered(12)[::2]
    with pytest.raises(ValueError, match="without gaps"):
        unflatten(every_other, [numbered(2, 3)])


@pytest.mark.parametrize("offset", [-1, 5, 11])
def test_a_view_does_not_leave_the_flat_tensor(offset: int) -> None:
    flat = torch.empty(20)[:10]  # the storage goes on behind it
    with pytest.raises(ValueError, match="flat has 10"):
        view_like(flat, offset, numbered(2, 3))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Up to four dims, in any order in memory, some cut to a slice or expanded."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = numbered(*shape).permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        step = draw(st.sampled_from((1, 1, 1, 2)))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if tensor.dim() < 4 and draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=5))
def test_any_tensors_make_the_round_trip(many: list[Tensor]) -> None:
    flat = flatten(many)
    assert flat.numel() == sum(t.numel() for t in many)
    for tensor, part in zip(many, unflatten(flat, many), strict=True):
        assert torch.equal(part, tensor)
        assert part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert not is_dense(tensor) or part.stride() == tensor.stride()


# The layout of shards


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    numels = draw(st.lists(st.integers(0, 9), max_size=6))
    return ShardLayout(tuple(numels), draw(st.integers(1, 7)))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_shards_are_equal_and_hold_every_element_once(layout: ShardLayout) -> None:
    seen = [[0] * numel for numel in layout.numels]
    for rank in range(layout.n):
        for piece in layout.pieces(rank):
            assert 0 <= piece.offset < piece.offset + piece.numel <= layout.shard_numel
            assert piece.in_shard == slice(piece.offset, piece.offset + piece.stop - piece.start)
            where = rank * layout.shard_numel + piece.offset
            assert where == layout.offsets[piece.index] + piece.start
            for i in range(piece.start, piece.stop):
                seen[piece.index][i] += 1
    assert all(count == 1 for counts in seen for count in counts)
    assert layout.padded_numel == layout.n * layout.shard_numel


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_padding_is_less_than_a_rank_each_and_at_the_end(layout: ShardLayout) -> None:
    padding = layout.padded_numel - sum(layout.numels)
    assert 0 <= padding < layout.n
    held = [sum(piece.numel for piece in layout.pieces(rank)) for rank in range(layout.n)]
    assert sum(held) == sum(layout.numels)
    assert held == sorted(held, reverse=True)  # what is not full is behind what is


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_pieces_lie_side_by_side_in_the_order_of_the_tensors(layout: ShardLayout) -> None:
    for rank in range(layout.n):
        end, last = 0, -1
        for piece in layout.pieces(rank):
            assert piece.offset == end
            assert piece.index > last
            end, last = piece.offset + piece.numel, piece.index


def test_with_more_shards_than_elements_some_hold_padding_alone() -> None:
    layout = ShardLayout((1, 0, 1), 4)
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 1, 0, 0]
    assert (layout.shard_numel, layout.padded_numel) == (1, 4)
    assert ShardLayout((), 3).padded_numel == ShardLayout((0, 0), 3).padded_numel == 0
