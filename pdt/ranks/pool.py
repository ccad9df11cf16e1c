"""Live ranks: processes that stay up between calls and answer from a notebook cell."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist

from pdt.comm import Link
from pdt.ranks import capacity
from pdt.ranks.call import Call, Printer
from pdt.ranks.cell import run_cell
from pdt.ranks.interrupt import interrupt_later
from pdt.ranks.launcher import fork_server
from pdt.ranks.process import RankProcess, await_ready, close, start
from pdt.ranks.transport import Message, pack
from pdt.ranks.worker import Task

BACKENDS = ("auto", "gloo", "nccl", "shm")


class Ranks:
    """`world_size` live processes with torch.distributed initialised among them.

    Each rank holds what its calls left behind (its process group, its `%%ranks` variables) until
    `close()`, a failed call, or the end of the `with` block.

    `backend`: "gloo" (CPU tensors; several ranks may share one GPU by moving data themselves),
    "nccl" (one GPU per rank), "shm" (this package's shared memory), or "auto": NCCL when every rank
    can have a GPU of its own, else gloo. `link`: put every transfer on this emulated wire.
    `timeout_s`: no call takes longer; then the ranks are stopped and the error says who waited for
    whom. Raises ValueError for a world size that is not positive or that this machine cannot carry.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "auto",
        link: Link | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        capacity.check(world_size)
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        if backend == "nccl" and torch.cuda.device_count() < world_size:
            raise ValueError(
                f"NCCL needs a GPU for each of the {world_size} ranks and this machine has "
                f"{torch.cuda.device_count()}: use backend='gloo', where ranks may share one"
            )
        self.world_size, self.link, self.timeout_s = world_size, link, timeout_s
        self.backend = _choose(world_size) if backend == "auto" else backend
        self._processes: list[RankProcess] = []
        self._store: dist.TCPStore | None = None
        self._sent_sources: set[str] = set()
        self._owner = os.getpid()
        self._start()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; the results, by rank.

        `fn` may be defined in a notebook cell and close over its variables: each rank gets a copy.
        Tensors on a GPU come back as CPU copies. What ranks print is shown as `[rank 1] ...`.
        Raises RankError when a rank raises, dies or does not answer in `timeout_s`; the other
        ranks are then stopped, and the next call works on fresh processes.
        """
        return self._call(fn, args, kwargs)

    def run_cell(self, source: str, name: str, printer: Printer) -> None:
        """Run the source of a cell in each rank's lasting namespace (`%%ranks` does).

        The ranks, and with them the variables, outlive an exception only if all ranks answered and
        had made the same collectives.
        """
        self._call(run_cell, (source, name), {}, takes_namespace=True, printer=printer)

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        *,
        takes_namespace: bool = False,
        printer: Printer | None = None,
    ) -> list[Any]:
        if self._owner != os.getpid():
            raise RuntimeError(
                "these Ranks belong to the process that made them, and this is a fork of it: "
                "make new Ranks here"
            )
        if not self._processes:
            self._start()
        message = _pack(Task(fn, args, kwargs, takes_namespace, self._new_sources()))
        call = Call(self._processes, self.timeout_s, printer or Printer())
        try:
            results = call.run(message)
        except BaseException:  # a KeyboardInterrupt too: nothing may run on behind it
            self.close()
            raise
        if call.error is not None:
            if not call.ranks_are_sound:
                self.close()
            raise call.error
        return results

    def _new_sources(self) -> dict[str, list[str]]:
        """The cells that these ranks have not seen: source lines that are in no file."""
        cells = {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and name not in self._sent_sources
        }
        self._sent_sources.update(cells)
        return cells

    def _start(self) -> None:
        self._sent_sources.clear()
        server = fork_server()
        try:
            with interrupt_later():  # no rank is forked that is not ours to end
                self._processes, self._store = start(
                    server, self.world_size, self.backend, self.link, self.timeout_s
                )
            await_ready(self._processes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks' processes now. A later `run` starts fresh ones."""
        with interrupt_later():
            processes, self._processes, self._store = self._processes, [], None
            if self._owner == os.getpid():
                close(processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_processes", None):
            self.close()

    def __repr__(self) -> str:
        up = "live" if self._processes else "stopped"
        return (
            f"<Ranks: {self.world_size} over {self.backend}, {up}, time-out {self.timeout_s:g} s>"
        )


def _choose(world_size: int) -> str:
    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


def _pack(task: Task) -> Message:
    if not callable(task.fn):
        raise TypeError(f"run() takes a function and its arguments, got {type(task.fn).__name__}")
    try:
        return pack(task)
    except Exception as error:
        name = getattr(task.fn, "__qualname__", repr(task.fn))
        raise TypeError(
            f"{name} or its arguments cannot be sent to the ranks ({error}): create what cannot "
            "be pickled (files, locks, sockets, process groups) inside the function"
        ) from error
