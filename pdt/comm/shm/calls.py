"""From the arguments of torch.distributed to the steps of a shared-memory group.

Each method gives a job: what the ranks compare in words, and a plan that, given its text and the
outputs, makes the steps. What a plan finds wrong (ValueError) is raised on every rank.
"""

from collections.abc import Callable, Sequence

import torch

from pdt.comm.shm.reduce import Op, Reduction
from pdt.comm.shm.steps import Collectives, Place, place
from pdt.comm.shm.tensors import Outputs, Tensors, check_equal, cut, describe, parts
from pdt.comm.shm.work import Steps

Plan = Callable[[str, Outputs], Steps]
Job = tuple[str, Plan]
_NOTHING = (0, 0)


class Calls:
    """The jobs of one rank."""

    def __init__(self, collectives: Collectives) -> None:
        self._steps = collectives
        self._rank, self._size = collectives.rank, collectives.world_size

    def all_reduce(self, tensor: torch.Tensor, op: Op, root: int | None = None) -> Job:
        """`tensor` becomes the reduction, on all ranks or on `root` alone."""

        def plan(text: str, outputs: Outputs) -> Steps:
            reduce = Reduction.of(op, tensor.dtype)
            return self._steps.all_reduce(text, outputs.flat(tensor), reduce, root)

        return describe(tensor), plan

    def broadcast(self, tensor: torch.Tensor, root: int) -> Job:
        """`tensor` becomes that of `root`."""

        def plan(text: str, outputs: Outputs) -> Steps:
            memory = place(outputs.flat(tensor))
            targets: list[Place | None] = [None] * self._size
            if self._rank == root:
                return self._steps.spread(text, memory, targets)
            targets[root] = memory
            return self._steps.spread(text, _NOTHING, targets)

        return describe(tensor), plan

    def all_gather(self, outs: Tensors | torch.Tensor, tensor: torch.Tensor) -> Job:
        """Part q of `outs` becomes rank q's `tensor`; sizes may differ by rank."""

        def plan(text: str, outputs: Outputs) -> Steps:
            targets = parts(outs, self._size, outputs.flat)
            check_equal([tensor], [targets[self._rank]])
            return self._steps.spread(
                text, place(outputs.source(tensor)), [place(t) for t in targets]
            )

        return describe(outs), plan

    def gather(self, outs: Tensors, tensor: torch.Tensor, root: int) -> Job:
        """On `root`, `outs[q]` becomes rank q's `tensor`; all of one size."""

        def plan(text: str, outputs: Outputs) -> Steps:
            targets: list[Place | None] = [None] * self._size
            if self._rank == root:
                memories = parts(outs, self._size, outputs.flat)
                check_equal([tensor] * self._size, memories)
                targets = [place(memory) for memory in memories]
            return self._steps.spread(text, place(outputs.source(tensor)), targets)

        return describe(tensor), plan

    def scatter(self, out: torch.Tensor, ins: Tensors, root: int) -> Job:
        """`out` becomes `ins[rank]` of `root`; all of one size."""

        def plan(text: str, outputs: Outputs) -> Steps:
            sources, targets = [_NOTHING] * self._size, [_NOTHING] * self._size
            targets[root] = place(outputs.flat(out))
            if self._rank == root:
                memories = parts(ins, self._size, outputs.source)
                check_equal(memories, [out] * self._size)
                sources = [place(memory) for memory in memories]
            return self._steps.deal(text, sources, targets)

        return describe(out), plan

    def reduce_scatter(self, out: torch.Tensor, ins: Tensors | torch.Tensor, op: Op) -> Job:
        """`out` becomes the reduction over all ranks of part `rank` of `ins`."""

        def plan(text: str, outputs: Outputs) -> Steps:
            inputs = parts(ins, self._size, outputs.source)
            check_equal([inputs[self._rank]], [out])
            reduce = Reduction.of(op, out.dtype)
            return self._steps.reduce_scatter(text, inputs, outputs.flat(out), reduce)

        return describe(ins), plan

    def all_to_all(self, outs: Tensors, ins: Tensors) -> Job:
        """`outs[q]` becomes `ins[rank]` of rank q; any sizes."""

        def plan(text: str, outputs: Outputs) -> Steps:
            sources = [place(tensor) for tensor in parts(ins, self._size, outputs.source)]
            targets = [place(tensor) for tensor in parts(outs, self._size, outputs.flat)]
            return self._steps.deal(text, sources, targets)

        return _dtypes([*ins, *outs]), plan

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Job:
        """The same for rows of one tensor each: `in_splits[q]` of them go to rank q."""

        def plan(text: str, outputs: Outputs) -> Steps:
            ins = cut(outputs.source(tensor), self._size, in_splits, _rows(tensor))
            outs = cut(outputs.flat(out), self._size, out_splits, _rows(out))
            return self._steps.deal(text, [place(t) for t in ins], [place(t) for t in outs])

        return _dtypes([tensor, out]), plan


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _dtypes(tensors: Tensors) -> str:
    return "/".join(sorted({str(tensor.dtype) for tensor in tensors}))
