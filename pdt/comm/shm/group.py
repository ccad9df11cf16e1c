"""A backend of torch.distributed for the ranks of one machine: they read each other's memory.

`ShmGroup` takes the calls of torch.distributed and of what is built on it (DDP, FSDP2, DTensor,
ZeroRedundancyOptimizer, pipelining); the neighbouring files do the work:

    board   counters and announcements in shared memory     futex   sleeping on a word of it
    steps   the collectives, piece by piece                 mail    send and recv
    reduce  sums and the like (pure)                        work, engine   who drives
"""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.shm.board import Board, header_nbytes
from pdt.comm.shm.calls import Calls, Job
from pdt.comm.shm.engine import COLLECTIVE, Engine
from pdt.comm.shm.mail import Mail, Receipt, ring_nbytes
from pdt.comm.shm.reduce import reduction_of
from pdt.comm.shm.steps import Collectives
from pdt.comm.shm.tensors import Outputs, Tensors, flat, listed
from pdt.comm.shm.work import ShmWork, Steps
from pdt.segment import exchange

# torch declares these methods with overloads that no subclass meets: they are not checked.
_ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(_ProcessGroup):
    """Ranks of one machine; each holds a segment of shared memory that all others have mapped.

    The ranks check at each collective that all make the same one: operation, elements, dtype, root
    and reduction. If not, it raises RuntimeError on every rank, saying what each has called, and
    the group goes on; `recv` raises ValueError for another size or dtype than was sent (the sender
    of a short message may be done by then). Waiting ends with a RuntimeError that names the ranks
    after `timeout`, or within a fraction of a second of a peer's death; the group is then unusable.
    Reductions are formed in the order of ranks, once, so that all ranks hold the same bits.

    A collective passes through slots of `slot_nbytes`, a message through letters of
    `letter_nbytes`. Large slots make fewer meetings, each of which may cost a switch of processes;
    4 MiB is best for four ranks on two cores.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=5),
        *,
        slot_nbytes: int = 1 << 22,
        letter_nbytes: int = 1 << 16,
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, "shm"
        mail_start = header_nbytes(size) + 2 * slot_nbytes
        nbytes = mail_start + size * ring_nbytes(letter_nbytes)
        timeout_s = timeout.total_seconds()
        self._segments = exchange(store, "shm", rank, size, nbytes, timeout_s)
        board = Board(self._segments, rank)
        self._collectives = Collectives(board, self._segments, slot_nbytes)
        self._calls = Calls(self._collectives)
        self._mail = Mail(board, self._segments, mail_start, letter_nbytes)
        self._engine = Engine(board, timeout_s)

    def getBackendName(self) -> str:
        return "shm"

    # torch's base class keeps the name in a backend of its own, which this group does not have.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def shutdown(self) -> None:
        """Let go of the shared memory; calls under way fail."""
        self._engine.close()
        for segment in self._segments:
            segment.close()

    abort = shutdown

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # its worker would live on
            self._engine.close()

    def _submit(
        self, steps: Steps, text: str, tensors: Tensors, opts: Any, lane: Hashable = COLLECTIVE
    ) -> ShmWork:
        work = ShmWork(steps, text, tensors, lane, self._engine.drive_until)
        self._engine.submit(work)
        if getattr(opts, "asyncOp", True):
            self._engine.start()
        else:
            self._engine.drive_until(work)
        return work

    def _collective(self, op: str, jobs: list[Job], results: Tensors, opts: Any) -> ShmWork:
        """Make one call, or several of one kind in a row."""
        outputs, steps = Outputs(), []
        for words, plan in jobs:
            text = f"{op} of {words}"
            try:
                steps.append(plan(text, outputs))
            except ValueError as error:
                steps.append(self._collectives.refuse(text, str(error)))
        return self._submit(outputs.after(steps), op, results, opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        op, tensors = reduction_of(opts), listed(tensors)
        jobs = [self._calls.all_reduce(tensor, op) for tensor in tensors]
        return self._collective(f"all_reduce {op}", jobs, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        op, root = reduction_of(opts), opts.rootRank
        jobs = [self._calls.all_reduce(tensor, op, root) for tensor in tensors]
        return self._collective(f"reduce {op} to {root}", jobs, tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        root, tensors = getattr(opts, "rootRank", opts), listed(tensors)
        jobs = [self._calls.broadcast(tensor, root) for tensor in tensors]
        return self._collective(f"broadcast from {root}", jobs, tensors, opts)

    def allgather(self, outs: list[Tensors], ins: Tensors, opts: Any = None) -> ShmWork:
        jobs = [self._calls.all_gather(o, t) for o, t in zip(outs, ins, strict=True)]
        return self._collective("all_gather", jobs, [t for each in outs for t in each], opts)

    def allgather_into_tensor_coalesced(
        self, outs: Tensors, ins: Tensors, opts: Any = None
    ) -> ShmWork:
        jobs = [self._calls.all_gather(o, t) for o, t in zip(outs, ins, strict=True)]
        return self._collective("all_gather", jobs, outs, opts)

    def _allgather_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        return self.allgather_into_tensor_coalesced([out], [tensor], opts)

    def allgather_coalesced(self, outs: list[Tensors], ins: Tensors, opts: Any = None) -> ShmWork:
        return self.allgather([list(each) for each in zip(*outs, strict=True)], ins, opts)

    def reduce_scatter(self, outs: Tensors, ins: list[Any], opts: Any = None) -> ShmWork:
        op = reduction_of(opts)
        jobs = [self._calls.reduce_scatter(o, i, op) for o, i in zip(outs, ins, strict=True)]
        return self._collective(f"reduce_scatter {op}", jobs, outs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter

    def _reduce_scatter_base(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> ShmWork:
        return self.reduce_scatter([out], [tensor], opts)

    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> ShmWork:
        return self._collective("all_to_all", [self._calls.all_to_all(outs, ins)], outs, opts)

    def alltoall_base(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int] = (),
        in_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> ShmWork:
        job = self._calls.all_to_all_single(out, tensor, out_splits, in_splits)
        return self._collective("all_to_all", [job], [out], opts)

    def gather(self, outs: list[Tensors], ins: Tensors, opts: Any) -> ShmWork:
        mine, root = outs[0] if outs else [], opts.rootRank
        job = self._calls.gather(mine, ins[0], root)
        return self._collective(f"gather to {root}", [job], mine, opts)

    def scatter(self, outs: Tensors, ins: list[Tensors], opts: Any) -> ShmWork:
        root = opts.rootRank
        job = self._calls.scatter(outs[0], ins[0] if ins else [], root)
        return self._collective(f"scatter from {root}", [job], outs, opts)

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._submit(self._collectives.barrier("barrier"), "barrier", [], opts)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> ShmWork:
        (tensor,) = tensors
        steps = self._mail.send(flat(tensor), dst, tag)
        return self._submit(steps, f"send to {dst}", tensors, None, ("send", dst))

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> ShmWork:
        (tensor,), outputs = tensors, Outputs()
        receipt = Receipt(outputs.flat(tensor), tag, src)
        steps = outputs.after([self._mail.receive(receipt)])
        text = f"recv from {'anyone' if src is None else src}"
        return self._submit(steps, text, tensors, None, receipt)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> ShmWork:
        return self.recv(tensors, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: each call of a coalesced row stands alone."""

    # The names of torch 2.13 and later.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter
    all_to_all_single = alltoall_base
