"""The torch backends `pdt_gloo`, `pdt_nccl` and `pdt_shm`: a counting group around each."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.link import Port, Wire
from pdt.comm.meter import MeterGroup
from pdt.comm.record import Recorder
from pdt.comm.shm import ShmGroup
from pdt.comm.topology import Link

BACKENDS = ("gloo", "nccl", "shm")


def init(backend: str = "gloo", *, link: Link | None = None, **kwargs: Any) -> None:
    """`dist.init_process_group`, with every group metered and, if `link` is given, delayed.

    Each rank holds the default group afterwards; sub-groups made by torch, by its DeviceMesh or by
    you are metered too and share the rank's recorder and its port to the emulated wire. `backend`
    is "gloo", "nccl" or "shm"; `kwargs` go to `init_process_group` as they are, so under torchrun
    `pdt.comm.init()` is all. Raises ValueError for another backend, and for a link with NCCL: its
    transfers run on the GPU, where a wait on the host delays nothing.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "nccl" and link is not None:
        raise ValueError("link is for gloo and shm: NCCL's transfers run on the GPU, not delayed")
    _register()
    dist.init_process_group(f"pdt_{backend}", pg_options=link, **kwargs)


@cache
def _register() -> None:
    for backend in BACKENDS:
        devices = {"nccl": ["cuda"], "shm": ["cpu"]}.get(backend, ["cpu", "cuda"])
        dist.Backend.register_backend(
            f"pdt_{backend}", _creator(backend), extended_api=True, devices=devices
        )


def _creator(backend: str) -> Any:
    def create(options: Any, link: Link | None) -> MeterGroup:
        rank, size = options.group_rank, options.group_size
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        inner = _inner(backend, options.store, rank, size, options)
        recorder, port = _of_this_rank(link)
        wire = Wire(port, options.store, ranks, rank, options.timeout) if port else None
        return MeterGroup(inner, options.group_id, ranks, recorder, wire)

    return create


def _of_this_rank(link: Link | None) -> tuple[Recorder, Port | None]:
    """The recorder and the port that all groups of a rank share: the default group's, if any."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(world, MeterGroup):
        return world.recorder, world.wire.port if isinstance(world.wire, Wire) else None
    return Recorder(), Port(link) if link is not None else None


def _inner(backend: str, store: dist.Store, rank: int, size: int, options: Any) -> Any:
    if backend == "shm":
        return ShmGroup(store, rank, size, options.timeout)
    group = dist.ProcessGroup(store, rank, size)
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), kind, gloo)
    else:
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device("cuda"), kind, nccl)
    group._set_default_backend(kind)
    return group
