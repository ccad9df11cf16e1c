"""Builds the C of adam.c with the machine's compiler at first use, keeps it, and calls it.

The build takes about a second and is kept in the user's cache folder, by a hash of what it was
made from, so that other processes load it at once. Where there is no compiler, or where building or
loading fails, `available()` is False, `why_not()` says why, and AdamW runs on torch alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("adam.c")
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as adam.c numbers them
COMPILERS = ("cc", "gcc", "clang")
# errno would keep sqrtf from being vectorised. Multiplications are fused with additions only where
# that is written, so that an element gives the same bits in the middle and the tail of a loop.
FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC")
# Tried in this order: a compiler may lack OpenMP (then one thread does all) or `native`.
MORE_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
_BUILD_TIMEOUT_S = 60.0


class Rule(ctypes.Structure):
    """What a step does to every element, as `rule` in adam.c; computed in double, rounded once."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in ["factor", "decay", "weight1", "beta2", "weight2", "root2", "eps", "step_size"]
    ]


class Compiled:
    """A loaded library. Its calls release the interpreter's lock; the tensors must stay alive."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._adamw, self._triad = library.pdt_adamw, library.pdt_triad
        self._adamw.argtypes = [address, number, ctypes.POINTER(Rule), ctypes.c_int]
        self._triad.argtypes = [address] * 3 + [ctypes.c_float, number, ctypes.c_int]
        self._adamw.restype = self._triad.restype = None
        self.kinds = dict(KINDS)
        if not library.pdt_has_float16():
            del self.kinds[torch.float16]

    def adamw(self, rows: Sequence[int], rule: Rule) -> None:
        """One step of the tensors that `rows` describe, on as many threads as torch uses.

        Nine numbers each, `row` of adam.c: five addresses (param, grad, exp_avg, exp_avg_sq, copy),
        the number of elements, and the kinds of param, grad and copy (0: no copy is wanted).
        """
        numbers = array("q", rows)
        where, _ = numbers.buffer_info()
        self._adamw(where, len(rows) // 9, ctypes.byref(rule), torch.get_num_threads())

    def triad(self, a: Tensor, b: Tensor, c: Tensor, scalar: float) -> None:
        """a = b + scalar * c, of contiguous float32 (numel,), on as many threads as torch uses."""
        where = [tensor.data_ptr() for tensor in (a, b, c)]
        self._triad(*where, scalar, a.numel(), torch.get_num_threads())


def available() -> bool:
    """Whether the compiled kernel is there; the first call may build it."""
    return isinstance(_find(), Compiled)


def why_not() -> str:
    """Why it is not there; empty where it is."""
    found = _find()
    return "" if isinstance(found, Compiled) else found


def get() -> Compiled:
    """The kernel of this process. Raises RuntimeError where there is none."""
    found = _find()
    if not isinstance(found, Compiled):
        raise RuntimeError(
            f"there is no compiled AdamW: {found}. Install a C compiler, or leave `compiled` at "
            "None to run on torch alone"
        )
    return found


@cache  # also of the failure: who has no compiler is not asked for one at each step
def _find() -> Compiled | str:
    try:
        return open_kernel()
    except (RuntimeError, OSError) as error:
        return str(error)


def open_kernel(folder: Path | None = None, compiler: str | None = None) -> Compiled:
    """The kernel that is kept in `folder` (the user's cache), else a new one, kept there if it can.

    Raises RuntimeError without a compiler (its path is looked for unless given), and with what
    the compiler or the loader said.
    """
    compiler = compiler or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"no C compiler ({', '.join(COMPILERS)}) on the path")
    if sys.platform == "win32" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise RuntimeError("it is written for 64-bit Linux and macOS")
    folder = folder or cache_folder()
    name = f"adam-{fingerprint(compiler)}"
    if folder is not None and (kept := _load_kept(folder, name)) is not None:
        return kept
    # A loaded library needs its file no more.
    with tempfile.TemporaryDirectory(prefix="pdt-kernel-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "adam.so"
        kernel = _build(compiler, path)
        if folder is not None:
            _keep(path.read_bytes(), folder, name)
        return kernel


def cache_folder() -> Path | None:
    """Where built kernels are kept; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdt"
    except RuntimeError:
        return None


def fingerprint(compiler: str) -> str:
    """A hash of all that a built kernel depends on: source, flags, compiler and processor."""
    real = Path(compiler).resolve()
    known = real.stat()
    parts = [SOURCE.read_text(), FLAGS, MORE_FLAGS, real, known.st_size, known.st_mtime_ns, _cpu()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu() -> list[str]:
    """Model and abilities: what `-march=native` makes for one may be illegal on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    telling = ("model name", "flags", "Features", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.startswith(telling)})]


def _load_kept(folder: Path, name: str) -> Compiled | None:
    """The kernel in a file of our own, whose name bears the hash of what it holds; else None.

    A file that was cut short would kill the process when it is loaded, so it is read first.
    """
    try:
        for path in folder.glob(f"{name}-*.so"):
            content = path.read_bytes()
            own = path.stat().st_uid == os.getuid()
            if own and path.name == _kept_name(name, content):
                return Compiled(path)
            path.unlink()
    except (OSError, AttributeError):  # cannot be read, loaded or removed, or is something else
        pass
    return None


def _kept_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _keep(content: bytes, folder: Path, name: str) -> None:
    """Write it in one piece: many ranks build at once, and each sees a whole file or none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=folder, prefix="partial-")
    except OSError:  # a home that cannot be written: the next process builds its own
        return
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(partial, folder / _kept_name(name, content))
    except OSError:  # a full disk
        pass
    finally:
        Path(partial).unlink(missing_ok=True)


def _build(compiler: str, path: Path) -> Compiled:
    """Compile and load with the first set of flags that works; the file is at `path`."""
    said = []
    for more in MORE_FLAGS:
        command = [compiler, *FLAGS, *more, str(SOURCE), "-o", str(path), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
            )
            if done.returncode == 0:
                return Compiled(path)
            said += done.stderr.strip().splitlines()[-1:]
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            said.append(str(error))
    raise RuntimeError(f"{compiler} made no library: {' | '.join(dict.fromkeys(said)) or 'silent'}")
