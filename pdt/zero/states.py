"""Optimizer states in logical form: one whole tensor a parameter, whatever ranks hold its parts.

What is saved has the form of torch's `state_dict`: "state" by the parameter's number in the groups,
"param_groups" with those numbers. No padding, no shard bounds and no world size are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm.started import start_all_gather
from pdt.flat import Piece, view_like
from pdt.zero.bucket import ShardedBucket
from pdt.zero.update import Run, ShardUpdate, is_sharded

if TYPE_CHECKING:
    from pdt.zero.sharded import ShardedOptimizer

MASTER = "master_param"  # the optimizer's own copy of a parameter, where it has one


@torch.no_grad()
def gather(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Every rank holds the whole state dict. One all-gather a bucket and state, and one of small
    values a bucket."""
    ids = _ids(optimizer)
    states: dict[int, dict[str, Any]] = {}
    for bucket, update in zip(optimizer.buckets, optimizer.updates, strict=True):
        for index, state in _gather_bucket(bucket, update).items():
            states[ids[id(bucket.params[index])]] = state
    groups = []
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        groups.append(settings | {"params": [ids[id(p)] for p in group["params"]]})
    return {"state": dict(sorted(states.items())), "param_groups": groups}


def _ids(optimizer: ShardedOptimizer) -> dict[int, int]:
    """Each parameter's number: in the order of the groups, as torch counts."""
    ids: dict[int, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            ids.setdefault(id(param), len(ids))
    return ids


def _gather_bucket(bucket: ShardedBucket, update: ShardUpdate) -> dict[int, dict[str, Any]]:
    """By the parameter's index in the bucket: its state, for those that have one."""
    own = {
        piece.index: _small(update, state, run.param.numel()) | _sharded_names(update, state, run)
        for run in update.runs
        if (state := update.optim.state.get(run.param, {})) or update.is_finer(run)
        for piece in run.pieces
    }
    told: list[Any] = [None] * bucket.world_size
    dist.all_gather_object(told, own, group=bucket.group)
    found: dict[int, dict[str, Any]] = {}
    for part in told:
        found |= {index: dict(state) for index, state in part.items() if index not in found}
    names = sorted({k for state in found.values() for k, v in state.items() if _is_dtype(v)})
    for name in names:
        dtype = next(v[name] for v in found.values() if name in v)
        flat = _gather_state(bucket, update, name, dtype)
        for index, view in enumerate(bucket.views(flat)):
            if name in found.get(index, {}):
                found[index][name] = view.clone()
    return found


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _small(update: ShardUpdate, state: dict[str, Any], numel: int) -> dict[str, Any]:
    """What belongs to a parameter as a whole."""
    return {
        k: v.clone() if isinstance(v, Tensor) else v
        for k, v in state.items()
        if not is_sharded(v, numel)
    }


def _sharded_names(update: ShardUpdate, state: dict[str, Any], run: Any) -> dict[str, Any]:
    """The dtype of each state that has an element for each of the parameter's."""
    names = {k: v.dtype for k, v in state.items() if is_sharded(v, run.param.numel())}
    return names | ({MASTER: update.master.dtype} if update.has_master else {})


def _gather_state(
    bucket: ShardedBucket, update: ShardUpdate, name: str, dtype: torch.dtype
) -> Tensor:
    """One state of a bucket, in the layout of its parameters."""
    flat = torch.zeros_like(bucket.flat, dtype=dtype)
    shard = flat.chunk(bucket.world_size)[bucket.rank]
    if name == MASTER:
        shard.copy_(update.master)
    else:
        for run in update.runs:
            value = update.optim.state.get(run.param, {}).get(name)
            if value is not None:
                shard[run.in_shard] = value
    start_all_gather(flat, bucket.group).wait()
    return flat


@torch.no_grad()
def scatter(optimizer: ShardedOptimizer, state_dict: dict[str, Any]) -> None:
    """Each rank keeps what lies in its shards."""
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    lengths = [[len(g["params"]) for g in each] for each in (saved_groups, groups)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"the saved groups have {lengths[0]} parameters, this optimizer's {lengths[1]}: make "
            "the groups as they were when it was saved"
        )
    saved: dict[int, dict[str, Any]] = {}  # by the parameter's id
    for saved_group, group in zip(saved_groups, groups, strict=True):
        settings = {k: v for k, v in saved_group.items() if k not in ("params", "param_names")}
        group.update(deepcopy(settings))
        for number, param in zip(saved_group["params"], group["params"], strict=True):
            if number in state_dict["state"]:
                saved[id(param)] = state_dict["state"][number]
    for bucket, update in zip(optimizer.buckets, optimizer.updates, strict=True):
        states = [saved.get(id(param)) for param in bucket.params]
        elementwise = {MASTER, *update.elementwise_states()}
        for param, position, state in zip(bucket.params, bucket.positions, states, strict=True):
            _check_shapes(optimizer.names[position], param, state, elementwise)
        _load_bucket(update, states, elementwise)


def _check_shapes(
    name: str, param: Tensor, state: dict[str, Any] | None, elementwise: set[str]
) -> None:
    for key in sorted(elementwise & (state or {}).keys()):
        if state and state[key].shape != param.shape:
            raise ValueError(
                f"{key!r} of {name} was saved in the shape {tuple(state[key].shape)}, the "
                f"parameter has {tuple(param.shape)}"
            )


def _load_bucket(
    update: ShardUpdate, states: Sequence[dict[str, Any] | None], elementwise: set[str]
) -> None:

    def history(piece: Piece) -> Any:
        """What the pieces of one run must have in common."""
        state = states[piece.index]
        if state is None:
            return None
        return {k: None if k in elementwise else _plain(v) for k, v in state.items()}

    update.reset(history)
    update.load([_state_of(update, run, states, elementwise) for run in update.runs])


def _state_of(
    update: ShardUpdate,
    run: Run,
    states: Sequence[dict[str, Any] | None],
    elementwise: set[str],
) -> dict[str, Any] | None:
    """A run's part of its parameters' states; what it has of the master copy is in place then."""
    params, state = update.bucket.params, states[run.pieces[0].index]
    if state is None:
        return None
    loaded = {}
    for key, value in state.items():
        if key in elementwise:
            parts = [_part(states[p.index], key, params[p.index], p) for p in run.pieces]
            loaded[key] = torch.cat(parts)
        else:
            loaded[key] = value.clone() if isinstance(value, Tensor) else value
    master = loaded.pop(MASTER, None)
    if master is not None and update.has_master:
        run.param.copy_(master)
    return loaded


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _part(state: dict[str, Any] | None, key: str, param: Tensor, piece: Piece) -> Tensor:
    """A piece of a saved tensor, in the order of the parameter's memory."""
    assert state is not None
    ordered = torch.empty(param.numel(), dtype=state[key].dtype, device=state[key].device)
    view_like(ordered, 0, param).copy_(state[key])
    return ordered[piece.start : piece.stop]
