"""The optimizer of one shard, which sees a flat tensor where the model has many.

So any elementwise optimizer of torch serves, and one call updates all parameters of a bucket. What
belongs to a parameter as a whole, its count of steps, is kept right by *runs*: neighbours in the
shard that had the same history share one flat tensor; a parameter that got no gradient in a step,
so that it must be left alone, leaves its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from pdt.flat import Piece
from pdt.zero.bucket import ShardedBucket

RUN_NUMEL = 1 << 18  # an optimizer's temporaries of this size stay in the processor's cache
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")  # of torch.optim


class Run:
    """Pieces that lie side by side in the shard, and the flat parameter that stands for them."""

    def __init__(self, pieces: Sequence[Piece], shard: Tensor) -> None:
        self.pieces = list(pieces)
        self.param = nn.Parameter(shard[self.in_shard])

    @property
    def in_shard(self) -> slice:
        last = self.pieces[-1]
        return slice(self.pieces[0].offset, last.offset + last.numel)


class ShardUpdate:
    """Updates a bucket's shard by an optimizer of `optimizer_class`, made with `defaults`.

    `settings` are those of the parameter group.
    With `master_dtype` the optimizer works on a copy of the shard in that dtype, which is rounded
    into the shard after each step.
    """

    def __init__(
        self,
        bucket: ShardedBucket,
        optimizer_class: type[torch.optim.Optimizer],
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        master_dtype: torch.dtype | None,
    ) -> None:
        self.bucket = bucket
        shard = bucket.shard
        copies = master_dtype not in (None, shard.dtype)
        self.master = shard.to(master_dtype) if copies else shard
        self.runs = [Run(pieces, self.master) for pieces in short(bucket.pieces)]
        params = [run.param for run in self.runs] or [nn.Parameter(shard.new_empty(0))]
        self.optim = optimizer_class([{"params": params, **settings}], **defaults)
        self._defaults = defaults

    @property
    def has_master(self) -> bool:
        return self.master.dtype != self.bucket.flat.dtype

    def is_finer(self, run: Run) -> bool:
        """Whether the master copy knows more of this run's parameters than they show."""
        shown = self.bucket.shard[run.in_shard]
        return self.has_master and not torch.equal(shown.to(self.master.dtype), run.param)

    def step(self, used: Sequence[bool], settings: Mapping[str, Any]) -> None:
        """One step with the bucket's `shard_grad`, for those of its parameters that are `used`."""
        grad = self.bucket.shard_grad
        if grad is None or not self.runs:
            return
        self.split(lambda piece: used[piece.index])
        self.optim.param_groups[0].update(settings)
        if self.has_master:
            self._follow_shard()
        for run in self.runs:
            if used[run.pieces[0].index]:
                run.param.grad = grad[run.in_shard].to(run.param.dtype)
        self.optim.step()
        for run in self.runs:
            run.param.grad = None
        if self.has_master:
            self.bucket.shard.copy_(self.master)

    def _follow_shard(self) -> None:
        """Take over what has been written to the parameters since: loaded, say, or averaged."""
        shard = self.bucket.shard
        differs = self.master.to(shard.dtype) != shard
        torch.where(differs, shard, self.master, out=self.master)

    def split(self, key: Callable[[Piece], Any]) -> None:
        """Part the runs so that all pieces of one have the same `key(piece)`."""
        runs: list[Run] = []
        for run in self.runs:
            parts = [list(part) for _, part in groupby(run.pieces, key)]
            runs += self._parted(run, parts) if len(parts) > 1 else [run]
        self._set_runs(runs)

    def reset(self, key: Callable[[Piece], Any]) -> None:
        """Begin with new states, and with runs whose pieces have the same `key(piece)`."""
        parts = [list(part) for _, part in groupby(self.bucket.pieces, key)]
        self._set_runs([Run(pieces, self.master) for part in parts for pieces in short(part)])
        self.optim.state.clear()
        if self.runs:
            self.optim.state.update(self._like([run.param for run in self.runs]).state)

    def load(self, states: Sequence[dict[str, Any] | None]) -> None:
        """The state of each run, in the dtypes and on the devices that torch gives them."""
        packed = self.optim.state_dict()
        packed["state"] |= {i: state for i, state in enumerate(states) if state is not None}
        self.optim.load_state_dict(packed)

    def _like(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer like the one underneath, for these."""
        settings = {k: v for k, v in self.optim.param_groups[0].items() if k != "params"}
        return type(self.optim)([{"params": params, **settings}], **self._defaults)

    def elementwise_states(self) -> set[str]:
        """The names of the states that have an element for each of the parameter's: of a trial."""
        trial = nn.Parameter(self.master.new_zeros(2))
        trial.grad = self.master.new_zeros(2)
        optim = self._like([trial])
        optim.step()
        return {name for name, value in optim.state[trial].items() if is_sharded(value, 2)}

    def _set_runs(self, runs: list[Run]) -> None:
        self.runs = runs
        if runs:
            self.optim.param_groups[0]["params"] = [run.param for run in runs]

    def _parted(self, run: Run, parts: Iterable[Sequence[Piece]]) -> list[Run]:
        state, numel, begin = self.optim.state.pop(run.param, {}), run.param.numel(), 0
        made = []
        for pieces in parts:
            part = Run(pieces, self.master)
            end = begin + part.param.numel()
            if state:
                self.optim.state[part.param] = {
                    name: value[begin:end].clone()
                    if is_sharded(value, numel)
                    else (value.clone() if isinstance(value, Tensor) else value)
                    for name, value in state.items()
                }
            begin = end
            made.append(part)
        return made


def short(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces that lie side by side, parted into stretches of RUN_NUMEL elements at most."""
    stretches: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        start, offset = piece.start, piece.offset
        while start < piece.stop:
            if room == 0:
                stretches.append([])
                room = RUN_NUMEL
            stop = min(piece.stop, start + room)
            stretches[-1].append(Piece(piece.index, start, stop, offset))
            room, offset, start = room - (stop - start), offset + (stop - start), stop
    return stretches


def is_sharded(value: Any, numel: int) -> bool:
    """Whether a value of an optimizer's state has an element for each of its parameter's."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel


def check_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """ValueError for those of torch's optimizers that need a parameter as a whole."""
    for cls in optimizer_class.__mro__:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in NOT_ELEMENTWISE:
            raise ValueError(
                f"{optimizer_class.__name__} looks at a parameter as a whole, and a shard holds "
                "parts of several: take an elementwise optimizer such as AdamW or SGD"
            )
