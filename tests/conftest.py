"""What every test shares: one thread per process, live ranks started once, marks that skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[..., Any]]:
    """`pool(4)` or `pool(2, backend="shm")`: live ranks, started once.

    A test that breaks ranks on purpose, or wants a link, makes its own `Ranks`.
    """
    from pdt import Ranks

    live: dict[tuple[int, str], Any] = {}

    def get(world_size: int, backend: str = "gloo") -> Any:
        key = (world_size, backend)
        if key not in live:
            live[key] = Ranks(world_size, backend=backend)
        return live[key]

    yield get
    for ranks in live.values():
        ranks.close()


@cache
def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


@cache
def _why_no_netns() -> str | None:
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        return "no unshare or no tc on the path"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=10)
    return None if made.returncode == 0 else f"no network namespace: {made.stderr.strip()}"


MANY_RANKS = ("test_ddp", "test_zero", "test_offload_zero", "test_shm", "test_collectives")
MANY_RANKS += ("test_pipeline",)


def _is_large_world(item: pytest.Item) -> bool:
    """A test of what ranks do together, on three or more: left to `make test`, two are quick."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    sizes = [params.get(name, 0) for name in ("world_size", "n")]
    return item.path.name.startswith(MANY_RANKS) and max(sizes) > 2


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_large_world(item):
            item.add_marker(pytest.mark.slow)
        for mark, reason in (("gpu", _why_no_gpu), ("netns", _why_no_netns)):
            if item.get_closest_marker(mark) is not None and (why := reason()) is not None:
                item.add_marker(pytest.mark.skip(reason=why))
