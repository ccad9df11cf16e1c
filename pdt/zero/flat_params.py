"""Parameters that are gathered and reduced together, of which this rank holds one shard.

Words: `flat` holds the whole parameters one behind the other, padded to n equal shards; its storage
object lives for ever, but has no bytes while the parameters are sharded, so what autograd saved of
it is valid again as soon as they are gathered. `shard` is this rank's part, which the optimizer
steps; a *piece* is what the shard holds of one parameter. `flat_grad` has the layout of `flat`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.started import Started, start_all_gather
from pdt.flat import Piece, ShardLayout, is_dense, unflatten
from pdt.zero.bucket import fill, must_scale_before
from pdt.zero.sharded_parameter import ShardedParameter


class FlatParams:
    """`params` of one dtype, on one device, that all require a gradient, or none.

    Their `.data` is switched between whole views of `flat` and pieces of `shard`, and `.grad` of a
    sharded parameter is a piece of the mean over ranks. `param_dtype` is the dtype of `flat`, and
    of what is computed; `reduce_dtype` that of `flat_grad`, and of sums. `resident` parameters are
    too small to be worth a message: every rank's shard holds all of them, and `flat` is a copy.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        *,
        resident: bool = False,
    ) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.group, self.resident = group, resident
        self.world_size = dist.get_world_size(group)
        self._place = 0 if resident else dist.get_rank(group)  # of this rank's shard in `flat`
        numels = tuple(p.numel() for p in self.params)
        self.layout = ShardLayout(numels, 1 if resident else self.world_size)
        first = self.params[0]
        is_real = first.dtype.is_floating_point
        self.dtype = param_dtype if is_real and param_dtype else first.dtype
        self.reduce_dtype = reduce_dtype if is_real and reduce_dtype else self.dtype
        self._forms = [  # shape, strides, offset
            (view.shape, view.stride(), view.storage_offset())
            for view in unflatten(
                torch.empty(self.layout.offsets[-1], dtype=first.dtype, device="meta"), self.params
            )
        ]
        self._allocate(first.device)
        self.flat_grad: Tensor | None = None  # of what has come and is not reduced
        self.has_grad = [False] * len(self.params)  # in this backward, or unreduced from before
        self._mean: Tensor | None = None  # of this backward, as far as it is reduced
        self._aside: list[Tensor | None] = []  # the pieces' gradients while a backward runs
        for name, param in named_params:
            param.__dict__["_pdt_name"] = name

    def _allocate(self, device: torch.device) -> None:
        numel, dtype = self.layout.shard_numel, self.params[0].dtype
        self.shard = torch.zeros(numel, dtype=dtype, device=device)
        self._slices = _slices(self.layout.pieces(self._place), len(self.params))
        self._sharded = self._pieces(self.shard)
        self._addresses = [piece.data_ptr() for piece in self._sharded]
        self._allocate_flat(self.dtype)

    def _allocate_flat(self, dtype: torch.dtype) -> None:
        numel = self.layout.padded_numel
        self.flat = torch.empty(numel, dtype=dtype, device=self.shard.device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._whole = self._views(self.flat)
        numel = self.layout.shard_numel
        self._own = self.flat.narrow(0, self._place * numel, numel)
        self.free()

    def set_exact(self, is_exact: bool) -> None:
        """Whether `flat` has the dtype of the shard, so that it can be written back."""
        dtype = self.shard.dtype if is_exact else self.dtype
        if dtype != self.flat.dtype:
            self._allocate_flat(dtype)

    def _pieces(self, shard: Tensor) -> list[Tensor]:
        """Of a tensor with the layout of the shard, what belongs to each parameter."""
        if self.resident:
            return self._views(shard)
        return [shard[part] for part in self._slices]

    @property
    def is_trained(self) -> bool:
        return any(param.requires_grad for param in self.params)

    # Sharded and whole

    @torch.no_grad()
    def cut(self) -> None:
        """Take the shard out of the whole parameters, and let go of these."""
        for piece in self.layout.pieces(self._place):
            source = _in_memory_order(self.params[piece.index].detach())
            self.shard[piece.in_shard] = source[piece.start : piece.stop]
        self.hide()
        self.free()

    def to(self, device: torch.device) -> None:
        """From the meta device: the parameters have memory afterwards, and no values yet."""
        self._allocate(device)
        for param, piece in zip(self.params, self._sharded, strict=True):
            param.__class__ = nn.Parameter
            torch.utils.swap_tensors(param, nn.Parameter(piece, param.requires_grad))
        self.hide()

    @torch.no_grad()
    def start_gather(self) -> Started:
        """Begin to fill `flat`, with what it has already, if it has bytes: it may be in use."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self._nbytes:  # the same size would move it
            storage.resize_(self._nbytes)
        self._own.copy_(self.shard)
        if self.resident:
            return Started((), (), lambda: None)
        return start_all_gather(self.flat, self.group)

    def expose(self) -> None:
        """The parameters are whole; `flat` has been gathered.

        RuntimeError when their memory was replaced meanwhile.
        """
        for i, (param, whole) in enumerate(zip(self.params, self._whole, strict=True)):
            param.__class__ = nn.Parameter  # first, for the guard costs time
            if param.data_ptr() != self._addresses[i]:
                raise RuntimeError(
                    f"the memory of {self.names[i]} was replaced after fully_shard (by "
                    "model.to(...), or .data = ...): do it before"
                )
            param.data = whole

    def hide(self) -> None:
        """The parameters are pieces of the shard."""
        kind = nn.Parameter if self.resident else ShardedParameter
        for param, piece in zip(self.params, self._sharded, strict=True):
            param.data = piece
            param.__class__ = kind

    def free(self) -> None:
        """Give the bytes of `flat` back."""
        self.flat.untyped_storage().resize_(0)

    @torch.no_grad()
    def keep_own(self) -> None:
        """The shard takes over what has been written to its part of `flat`."""
        self.shard.copy_(self._own)

    # Gradients

    def put_aside(self) -> None:
        """Make room in `.grad` for whole gradients."""
        self._aside = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def collect(self) -> bool:
        """Move the whole gradients that have come into `flat_grad`; whether there are any."""
        came = [i for i, param in enumerate(self.params) if param.grad is not None]
        if not came:
            return False
        grads = [param.grad for param in self.params]
        if any(grads[i].requires_grad for i in came):  # type: ignore[union-attr]
            raise RuntimeError(
                "a gradient of a sharded parameter has a graph of its own (create_graph=True), "
                "which sharding it would cut off"
            )
        if self.flat_grad is None:
            self.flat_grad = self._new_flat_grad()
            fill(self._views(self.flat_grad), grads, 1.0)
        else:
            views = self._views(self.flat_grad)
            for i in came:
                views[i].add_(grads[i].detach())  # type: ignore[union-attr]
        for i in came:
            self.has_grad[i] = True
            self.params[i].grad = None
        return True

    def _new_flat_grad(self) -> Tensor:
        numel = self.layout.padded_numel
        flat_grad = torch.empty(numel, dtype=self.reduce_dtype, device=self.shard.device)
        flat_grad[self.layout.offsets[-1] :].zero_()
        return flat_grad

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Of a new tensor with the layout of `flat`, the parts in the parameters' shapes."""
        return [flat.as_strided(*form) for form in self._forms]

    def take_flat_grad(self) -> Tensor:
        """What has been collected, to be reduced; nothing counts as zero."""
        flat_grad, self.flat_grad = self.flat_grad, None
        if flat_grad is None:
            flat_grad = self._new_flat_grad().zero_()
        if must_scale_before(flat_grad.dtype):
            flat_grad.div_(self.world_size)
        return flat_grad

    def add_sum(self, total: Tensor) -> None:
        """The shard of one reduction in this backward, of what `take_flat_grad` gave on all ranks;
        it is copied."""
        scaled = must_scale_before(total.dtype)
        mean = total.clone() if scaled else total / self.world_size
        mean = mean.to(self.shard.dtype)
        self._mean = mean if self._mean is None else self._mean.add_(mean)

    def hand_out(self, used: Sequence[bool]) -> None:
        """`.grad` of a sharded parameter: what was there, and the mean if it was used anywhere."""
        mean, self._mean = self._mean, None
        parts = self._aside if mean is None else self._pieces(mean)
        for i, before in enumerate(self._aside):
            grad, part = before, parts[i]
            if mean is not None and used[i] and part is not None:
                grad = part if before is None else before.add_(part)
            self.params[i].grad = grad
        self._aside = []
        if self.flat_grad is None:
            self.has_grad = [False] * len(self.params)

    def forget(self) -> None:
        """Drop what an unfinished backward has left, but for what was there before it."""
        self.flat_grad, self._mean = None, None
        self.hand_out([False] * len(self.params))


def _slices(pieces: Sequence[Piece], count: int) -> list[slice]:
    found = [slice(0, 0)] * count
    for piece in pieces:
        found[piece.index] = piece.in_shard
    return found


def _in_memory_order(tensor: Tensor) -> Tensor:
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.flatten()
