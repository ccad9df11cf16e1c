"""Sleeping on a word of shared memory until another process changes it.

On Linux by `futex(2)`, which costs no core while it sleeps and wakes within microseconds; elsewhere
by naps that grow to a millisecond.
"""

import ctypes
import errno
import platform
import sys
import time

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_WAITV_CALL = 449  # the same number on every architecture; Linux 5.16 and later
_WAIT, _WAKE, _WORD_IS_32_BITS, _CLOCK_MONOTONIC = 0, 1, 2, 1

NAP_S = 0.05  # the longest sleep; between two of them the caller looks whether its peers live


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("seen", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_futex = ctypes.CDLL(None).syscall  # a second handle: this one need not save errno
_futex.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
)
_NAP = ctypes.byref(_Timespec(0, int(NAP_S * 1e9)))
HAS_FUTEX = sys.platform == "linux" and _FUTEX_CALL is not None


def _has_waitv() -> bool:
    """Whether one call can sleep on many words: older kernels and some sandboxes refuse it."""
    if not HAS_FUTEX:
        return False
    _libc.syscall(_WAITV_CALL, None, 0, 0, None, 0)
    return ctypes.get_errno() == errno.EINVAL


HAS_WAITV = _has_waitv()


def wake(address: int) -> None:
    """Wake all that sleep on the 4-byte word at `address`; its new value must have been stored."""
    if HAS_FUTEX:
        _futex(_FUTEX_CALL, address, _WAKE, 0x7FFFFFFF, None)


def sleep(words: list[tuple[int, int]], attempt: int) -> None:
    """Sleep until one of `words` (address, last value seen) differs, a wake, or `NAP_S` seconds.

    `attempt` counts the sleeps in a row; where there is no futex the nap grows with it.
    """
    if not HAS_FUTEX:
        time.sleep(min(2e-5 * 2**attempt, 1e-3))
    elif len(words) == 1:
        address, seen = words[0]
        _futex(_FUTEX_CALL, address, _WAIT, seen & 0xFFFFFFFF, _NAP)
    elif HAS_WAITV:
        _sleep_on_many(words)
    else:
        time.sleep(min(2e-5 * 2**attempt, 1e-3))


def _sleep_on_many(words: list[tuple[int, int]]) -> None:
    waiters = (_Waiter * len(words))(
        *(_Waiter(seen & 0xFFFFFFFF, address, _WORD_IS_32_BITS, 0) for address, seen in words)
    )
    end_s = time.clock_gettime(time.CLOCK_MONOTONIC) + NAP_S
    end = _Timespec(int(end_s), int(end_s % 1 * 1e9))
    _libc.syscall(
        _WAITV_CALL, waiters, len(words), 0, ctypes.byref(end), ctypes.c_long(_CLOCK_MONOTONIC)
    )


X86 = platform.machine() in ("x86_64", "AMD64")
_barrier = None if X86 else getattr(ctypes.CDLL(None), "OSMemoryBarrier", None)
_fence_word = ctypes.c_uint32()


def fence() -> None:
    """Keep this process's reads and writes of shared memory before and after the call in order.

    x86 keeps loads in order and stores in order by itself, which is all that is needed here. Other
    processors get a full barrier: macOS exports one; on Linux the kernel executes one in every
    FUTEX_WAKE, before it looks for sleepers.
    """
    if X86:
        return
    if _barrier is not None:
        _barrier()
    else:
        wake(ctypes.addressof(_fence_word))
