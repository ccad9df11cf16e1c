"""A storage that is away on the host, and the views of it that a graph keeps."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pdt.offload.bus import Bus, Transfer
from pdt.offload.host_buffers import HostBuffers

OUTSIDE = -1  # the number of a backward pass where there is none


class Away:
    """One storage and its bytes on the host; it is on the device, too, in `source` or `back`."""

    def __init__(
        self, tensor: Tensor, bus: Bus, buffers: HostBuffers, before: weakref.ref[Away] | None
    ) -> None:
        storage = tensor.untyped_storage()
        self._before = before
        self._bus, self._buffers, self._device = bus, buffers, tensor.device
        self._of, self._version = weakref.ref(storage), tensor._version
        self._views = self._unused = 0
        self._backward = OUTSIDE  # the pass that uses it
        self.source: Tensor | None = self._flat(0).set_(storage)
        self._host = self._buffers.take(storage.nbytes())
        self._back: Tensor | None = None
        self._returning: Transfer | None = None  # until somebody has waited for it
        self.sent = self._bus.to_host([(self.source, self._host)], "activations")

    def __del__(self) -> None:
        self._buffers.give(self._host, self._returning)

    def holds(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether it is this storage, with the bytes that it has now."""
        return self._of() is storage and self._version == version

    def before_it(self) -> Away | None:
        """The storage that left before it, while a graph keeps that."""
        return None if self._before is None else self._before()

    def add_view(self) -> None:
        self._views += 1

    def fetch(self) -> None:
        """Begin to bring it back, if it is not on the device."""
        if self.source is None and self._back is None:
            self._back = self._flat(self._host.numel())
            self._returning = self._bus.to_device([(self._host, self._back)], "activations")

    def is_wanted(self, backward: int) -> bool:
        """Whether this backward has views of it left to use."""
        return self._backward != backward or self._unused > 0

    def use(self, backward: int) -> torch.UntypedStorage:
        """The storage on the device; with the last of its views it is let go of."""
        if self._backward != backward:
            self._backward, self._unused = backward, self._views
        self.fetch()
        flat = self.source if self._back is None else self._back
        assert flat is not None
        if self._returning is not None:
            self._returning.wait()
            self._returning = None
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream(flat.device))
        self._unused -= 1
        if self._unused == 0:
            self._back = None
        return flat.untyped_storage()

    def forget(self) -> None:
        """Free what has come back; the bytes stay on the host."""
        if self._returning is not None:
            self._returning.wait()
            self._returning = None
        self._back = None

    def _flat(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class SavedView:
    """Stands in the graph for a tensor whose storage is away."""

    def __init__(self, away: Away, tensor: Tensor) -> None:
        self.away = away
        away.add_view()
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        self._version, self._device = tensor._version, tensor.device
        self._probe = tensor.detach()  # shares the counter of changes in place,
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # not memory

    def check(self) -> None:
        check_version(self._probe, self._version, tuple(self._shape))

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, laid over the storage as it was."""
        tensor = torch.empty(0, dtype=self._dtype, device=self._device)
        return tensor.set_(storage, self._offset, self._shape, self._stride)


def check_version(tensor: Tensor, version: int | None, shape: tuple[int, ...]) -> None:
    """Raises RuntimeError, as autograd does, when the tensor has been changed in place since."""
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {shape} is at version {tensor._version}, expected "
            f"version {version}"
        )
