"""How the ledger learns of storages: a dispatch mode sees the tensors of every operation."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pdt.measure.storages import StorageLog
from pdt.measure.tensors import plain_tensors, tensors_in

# Here torch's DDP makes its buckets, in C++, and then lays the gradients' views over each of them.
_BUCKET_MAKERS = {
    getattr(DistributedDataParallel, name).__code__
    for name in ("_ddp_init_helper", "_pre_forward")
    if hasattr(DistributedDataParallel, name)
}
_AS_STRIDED = torch.ops.aten.as_strided.default
_WRAPPERS = 4  # frames that torch puts between a C++ caller's Python frame and ours, at most


def is_watching() -> bool:
    """Whether a ledger is open on this thread."""
    return any(isinstance(mode, Watch) for mode in _get_current_dispatch_mode_stack())


class Watch(TorchDispatchMode):
    """Shows the log each storage that an operation reads or makes, after the operation."""

    def __init__(self, log: StorageLog, parameter_weight: int) -> None:
        super().__init__()
        self._log = log
        self._parameter_weight = parameter_weight

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first unfolds into the plain operations it stands for
        result = func(*args, **(kwargs or {}))
        log = self._log
        for tensor in tensors_in((args, kwargs, result)):
            for part in plain_tensors(tensor):
                storage = log.see(part)
                if type(part) is nn.Parameter:
                    log.name(storage, "parameters", self._parameter_weight)
        if func is _AS_STRIDED and _called_by_bucket_maker():
            log.name(log.see(result), "buckets", self._parameter_weight)
        return result


def _called_by_bucket_maker() -> bool:
    frame = sys._getframe(2)
    for _ in range(_WRAPPERS):
        if frame is None or frame.f_code in _BUCKET_MAKERS:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code in _BUCKET_MAKERS


@contextmanager
def seen_resizes(log: StorageLog) -> Iterator[None]:
    """Show the log each `storage.resize_` at once; it is no operation, so no mode sees it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, nbytes: int) -> Any:
        result = original(storage, nbytes)
        log.reread(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
