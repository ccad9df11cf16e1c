"""`pdt.buckets`: plans that hold each parameter once, keep to their caps, and equal torch's."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdt.buckets import Bucket, MiB, assign_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CAPS = st.one_of(st.just(0), st.integers(1, 3000), st.just(math.inf))  # bytes


def tensor(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


TENSORS = st.lists(st.builds(tensor, st.integers(0, 200), st.sampled_from(DTYPES)), max_size=20)


@st.composite
def tied(draw: st.DrawFn) -> list[Tensor]:
    """Tensors, some of which stand at several positions."""
    tensors = draw(TENSORS)
    places = draw(st.lists(st.sampled_from(tensors or [tensor(3, torch.float32)]), max_size=10))
    return draw(st.permutations(tensors + places))


def plan(
    params: list[Tensor], cap: float, first: float, order: list[int] | None = None
) -> list[Bucket]:
    """Caps in bytes."""
    return assign_buckets(params, bucket_cap_mb=cap / MiB, first_bucket_mb=first / MiB, order=order)


def first_positions(params: list[Tensor]) -> list[int]:
    return [i for i, p in enumerate(params) if not any(p is q for q in params[:i])]


@given(tied(), CAPS, CAPS)
def test_each_distinct_parameter_is_in_one_bucket_once_at_its_first_position(params, cap, first):
    placed = [i for bucket in plan(params, cap, first) for i in bucket.params]
    assert sorted(placed) == first_positions(params)


@given(tied(), CAPS, CAPS)
def test_a_bucket_has_one_dtype_and_lays_its_parameters_side_by_side(params, cap, first):
    for index, bucket in enumerate(plan(params, cap, first)):
        assert bucket.index == index
        assert {params[i].dtype for i in bucket.params} == {bucket.dtype}
        numels = [end - start for start, end in pairwise(bucket.offsets)]
        assert bucket.offsets[0] == 0
        assert numels == [params[i].numel() for i in bucket.params]
        assert bucket.numel == sum(numels)
        assert bucket.nbytes == sum(params[i].nbytes for i in bucket.params)


def test_a_bucket_has_one_device():
    params = [torch.empty(4, device=device) for device in ("cpu", "meta", "cpu", "meta")]
    buckets = plan(params, math.inf, math.inf)
    assert [(bucket.params, bucket.device.type) for bucket in buckets] == [
        ((3, 1), "meta"),
        ((2, 0), "cpu"),
    ]


@given(tied(), CAPS, CAPS)
def test_a_bucket_is_closed_with_the_parameter_that_reaches_its_cap(params, cap, first):
    buckets = plan(params, cap, first)
    for dtype in DTYPES:
        own = [bucket for bucket in buckets if bucket.dtype == dtype]
        for number, bucket in enumerate(own):
            limit = cap if number else first
            assert bucket.nbytes - params[bucket.params[-1]].nbytes < limit or limit == 0
            assert bucket.nbytes >= limit or bucket is own[-1]


@given(tied(), CAPS, CAPS)
def test_backwards_order_is_kept_in_and_between_buckets(params, cap, first):
    buckets = plan(params, cap, first)
    firsts = [bucket.params[0] for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True)
    for dtype in DTYPES:
        own = [i for bucket in buckets if bucket.dtype == dtype for i in bucket.params]
        assert own == sorted(own, reverse=True)


@given(tied(), CAPS, CAPS, st.data())
def test_a_given_order_is_kept_like_the_reverse_one(params, cap, first, data):
    order = data.draw(st.permutations(first_positions(params)))
    moved = [params[i] for i in reversed(order)]  # so that reverse registration is the order
    by_order = [bucket.params for bucket in plan(params, cap, first, order)]
    last = len(order) - 1
    assert by_order == [
        tuple(order[last - i] for i in bucket.params) for bucket in plan(moved, cap, first)
    ]


@given(tied())
def test_a_cap_of_nothing_gives_each_parameter_a_bucket_and_an_endless_one_each_dtype(params):
    alone = plan(params, 0, 0)
    assert [len(bucket.params) for bucket in alone] == [1] * len(first_positions(params))
    dtypes = [bucket.dtype for bucket in plan(params, math.inf, math.inf)]
    assert len(dtypes) == len(set(dtypes)) == len({p.dtype for p in params})


@given(TENSORS, CAPS, CAPS)
def test_plans_equal_torchs_on_the_same_order(params, cap, first):
    order = [tensor(p.numel(), p.dtype) for p in reversed(params)]
    limits = [2**62 if limit == math.inf else limit for limit in (first, cap)]
    theirs, _ = dist._compute_bucket_assignment_by_size(order, limits) if order else ([], [])
    last = len(params) - 1
    ours = [[last - i for i in bucket.params] for bucket in plan(params, cap, first)]
    assert ours == theirs


@given(TENSORS, CAPS, CAPS)
def test_the_gradients_dtypes_count_where_they_are_given(params, cap, first):
    dtypes = [torch.float32] * len(params)
    caps = {"bucket_cap_mb": cap / MiB, "first_bucket_mb": first / MiB}
    as_fp32 = [tensor(p.numel(), torch.float32) for p in params]
    assert assign_buckets(params, **caps, dtypes=dtypes) == assign_buckets(as_fp32, **caps)


def test_the_first_bucket_is_1_mib_and_the_others_25_by_default():
    params = [torch.empty(MiB // 8, device="meta") for _ in range(110)]  # 0.5 MiB each
    assert [len(bucket.params) for bucket in assign_buckets(params)] == [2, 50, 50, 8]


@pytest.mark.parametrize("cap", [-1, math.nan])
@pytest.mark.parametrize("name", ["bucket_cap_mb", "first_bucket_mb"])
def test_a_cap_that_is_no_size_is_refused_by_name(name, cap):
    with pytest.raises(ValueError, match=f"{name} must be 0 or more MiB, got {cap}"):
        assign_buckets([torch.empty(1)], **{name: cap})


@pytest.mark.parametrize("order", [[0], [0, 1, 1], [0, 2], [0, 1, 2]])
def test_an_order_that_does_not_name_each_parameter_once_is_refused(order):
    param, other = torch.empty(1), torch.empty(2)
    with pytest.raises(ValueError, match=r"each of the 2 distinct parameters once"):
        assign_buckets([param, other, param], order=order)
