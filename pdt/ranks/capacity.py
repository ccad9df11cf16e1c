"""How many ranks this machine can carry, asked before it starts to swap."""

from __future__ import annotations

import os

RANK_NBYTES = 64 * 2**20  # an idle rank's own memory is about 40 MB; the rest is for small work
SPARE_NBYTES = 256 * 2**20
RANK_FDS = 4  # calls, questions, output in the parent, and one to spare


def available_nbytes() -> int | None:
    """Memory that can still be used, the container's limit included; None where unknown."""
    amounts = [n for n in (_meminfo_nbytes(), _cgroup_nbytes()) if n is not None]
    return min(amounts) if amounts else None


def _meminfo_nbytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):
        return None


def _cgroup_nbytes() -> int | None:
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as now,
        ):
            return int(limit.read()) - int(now.read())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def check(world_size: int) -> None:
    """Raise ValueError unless `world_size` ranks are possible here."""
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"world_size must be an int, got {type(world_size).__name__}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    available = available_nbytes()
    need = world_size * RANK_NBYTES + SPARE_NBYTES
    if available is not None and need > available:
        most = max(0, (available - SPARE_NBYTES) // RANK_NBYTES)
        raise ValueError(
            f"{world_size} ranks need about {need / 1e9:.1f} GB and {available / 1e9:.1f} GB are "
            f"free: this machine carries {most}"
        )
    _check_descriptors(world_size)


def _check_descriptors(world_size: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    need = world_size * RANK_FDS + 64
    if need > soft != resource.RLIM_INFINITY:
        raise ValueError(
            f"{world_size} ranks need about {need} file descriptors and the limit is {soft}: "
            f"raise it by `ulimit -n {need}` or take at most {max(0, (soft - 64) // RANK_FDS)}"
        )


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
