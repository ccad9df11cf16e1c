"""Looks at this machine, one thing each: is it there, what does lacking it cost, and the fix.

Nothing is changed on the machine, and nothing here needs torch to be installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from pdt.ranks import capacity

MIN_PYTHON, LAST_TESTED = (3, 11), (3, 13)
MIN_TORCH = (2, 11)
LESSON_RANKS = 4  # what the lessons start at once
LESSON_FDS = 512


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `essential`: without it no lesson runs."""

    name: str
    ok: bool
    value: str
    costs: str = ""
    fix: str = ""
    essential: bool = False


def python(version: tuple[int, int]) -> Finding:
    """Whether this Python is one that the course runs on."""
    note = " (newer than any tested)" if version > LAST_TESTED else ""
    return Finding(
        "Python",
        version >= MIN_PYTHON,
        f"{version[0]}.{version[1]}{note}",
        "nothing runs",
        "install Python 3.11, 3.12 or 3.13, then `make setup`",
        essential=True,
    )


def torch() -> Finding:
    """Whether torch imports, is recent enough, and can join processes over gloo."""
    costs, fix = "nothing runs", "`make setup`"
    try:
        import torch as module
        import torch.distributed as dist
    except Exception as error:
        return Finding("torch", False, f"does not import: {error}", costs, fix, essential=True)
    numbers = module.__version__.split("+")[0].split(".")
    recent = tuple(int(number) for number in numbers[:2]) >= MIN_TORCH
    gloo = dist.is_available() and dist.is_gloo_available()
    value = f"{module.__version__}, {'with' if gloo else 'WITHOUT'} gloo"
    return Finding("torch", recent and gloo, value, costs, fix, essential=True)


def packages(name: str, modules: tuple[str, ...], costs: str, essential: bool = False) -> Finding:
    """Whether these modules are installed; they are looked for, not imported."""
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    value = f"without {', '.join(lacking)}" if lacking else ", ".join(modules)
    return Finding(name, not lacking, value, costs, "`make setup`", essential)


def cores(count: int, quota: float | None) -> Finding:
    """Whether two ranks can compute at the same time."""
    usable = count if quota is None else min(count, quota)
    value = f"{count}" if quota is None else f"{count}, of which the container grants {quota:g}"
    costs = "ranks take turns: results and bytes are right, overlap shows little"
    return Finding("CPU cores", usable >= 2, value, costs, "grant the machine two cores or more")


def core_count() -> int:
    """Cores this process may be scheduled on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the container's limit grants (cgroup v2, else v1); None without a limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no cgroup here, or "max"
        return None


def memory() -> Finding:
    """How many idle ranks the free memory carries."""
    costs = f"lessons start {LESSON_RANKS} ranks"
    fix = "close other programs, or give the machine more"
    available = capacity.available_nbytes()
    if available is None:
        return Finding("memory", True, "free memory is not known on this system")
    carries = max(0, available - capacity.SPARE_NBYTES) // capacity.RANK_NBYTES
    value = f"{available / 2**30:.1f} GiB free, carries about {carries} idle ranks"
    return Finding("memory", carries >= LESSON_RANKS, value, costs, fix)


def gpus() -> Finding:
    """Which GPUs torch sees, and whether NCCL can join them."""
    costs = "ranks use gloo on the CPU; what is marked gpu in tests and lessons is left out"
    fix = "a CUDA device with its driver, and a CUDA build of torch"
    try:
        import torch as module
        import torch.distributed as dist
    except Exception:
        return Finding("GPUs", False, "not counted: torch does not import", costs, fix)
    if not module.cuda.is_available():
        return Finding("GPUs", False, "none", costs, fix)
    every = [module.cuda.get_device_properties(i) for i in range(module.cuda.device_count())]
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in every)
    nccl = dist.is_nccl_available()
    return Finding("GPUs", nccl, f"{names}, {'with' if nccl else 'WITHOUT'} NCCL", costs, fix)


def shared_memory() -> Finding:
    """Whether ranks can open each other's memory without a name in any file system."""
    shm = Path("/dev/shm")
    size = f"; /dev/shm has {shutil.disk_usage(shm).free / 2**20:.0f} MiB free" * shm.is_dir()
    costs = 'backend="shm" uses a temporary file instead'
    try:
        fd = os.memfd_create("pdt-doctor")
    except (AttributeError, OSError) as error:
        return Finding("shared memory", False, f"no memfd: {error}{size}", costs, "Linux")
    try:
        with open(f"/proc/{os.getpid()}/fd/{fd}", "r+b"):
            return Finding("shared memory", True, f"memfd{size}")
    except OSError as error:
        value, fix = f"memfd cannot be opened by path: {error}{size}", "mount /proc"
        return Finding("shared memory", False, value, costs, fix)
    finally:
        os.close(fd)


def loopback() -> Finding:
    """Whether processes of this machine can talk over TCP."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=2):
                return Finding("loopback", True, "127.0.0.1 answers")
    except OSError as error:
        costs, fix = (
            "ranks cannot meet: nothing runs",
            "allow TCP on 127.0.0.1 (`ip link set lo up`)",
        )
        return Finding("loopback", False, str(error), costs, fix, essential=True)


def temporary_folder() -> Finding:
    """Whether a socket can be made in the temporary folder: the fork server listens on one."""
    costs, fix = "ranks cannot start", "`export TMPDIR=/tmp`, or another short path with space"
    try:
        with tempfile.TemporaryDirectory(prefix="pymp-") as folder:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{folder}/listener-xxxxxxxx")
            free = shutil.disk_usage(folder).free / 2**30
            return Finding(
                "temporary folder", True, f"{tempfile.gettempdir()}, {free:.0f} GiB free"
            )
    except (OSError, AttributeError) as error:
        return Finding("temporary folder", False, str(error), costs, fix, essential=True)


def descriptors(limit: int | None) -> Finding:
    """Whether enough files and sockets may be open at once."""
    value = "no limit" if limit is None else f"{limit}"
    ok = limit is None or limit >= LESSON_FDS
    costs = "many ranks at once fail with `Too many open files`"
    return Finding(
        "file descriptors", ok, value, costs, f"`ulimit -n {LESSON_FDS}` before starting"
    )


def descriptor_limit() -> int | None:
    """The soft limit on open files; None where there is none."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def compiler() -> Finding:
    """Whether a C compiler is on the path; it is not run."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    costs = "AdamW on the host runs on torch alone: the same results, in more passes over memory"
    fix = "a C compiler, as `gcc` or `clang`"
    return Finding("C compiler", found is not None, found or "none on the path", costs, fix)


def namespaces() -> Finding:
    """Whether a private network can be made and throttled."""
    costs = "no really throttled network and no hosts in namespaces; the emulated link remains"
    fix = "Linux with util-linux and iproute2, and the right to make user namespaces"
    lacking = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if lacking:
        return Finding("namespaces and tc", False, f"no {', '.join(lacking)}", costs, fix)
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
    command += ["rate", "1gbit", "burst", "64kb", "latency", "1ms"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("namespaces and tc", False, str(error), costs, fix)
    lines = done.stderr.strip().splitlines()
    value = "a private loopback was throttled" if done.returncode == 0 else " ".join(lines[:1])
    return Finding("namespaces and tc", done.returncode == 0, value, costs, fix)


def writable(checkout: Path) -> Finding:
    """Whether results can be written beside the sources."""
    costs = "no figures, results or executed notebooks are saved"
    fix = "copy the checkout to a folder of yours"
    try:
        with tempfile.TemporaryFile(dir=checkout):
            return Finding("checkout", True, f"{checkout} can be written")
    except OSError as error:
        return Finding("checkout", False, str(error), costs, fix)
