"""Hold back Ctrl-C for the moments in which a process is between two owners."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_later() -> Iterator[None]:
    """A Ctrl-C during the block is raised at its end, so that what it starts or ends is known.

    For short blocks. Python raises it in the main thread alone, so elsewhere this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
