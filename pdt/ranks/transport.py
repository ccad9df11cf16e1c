"""Objects on a connection: functions of a cell by cloudpickle, tensors without copies."""

from __future__ import annotations

import ctypes
import importlib
import io
import marshal
import os
import pickle
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

PIECE_NBYTES = 1 << 20
_MODULE_LIKE = (type(torch.ops), type(torch.classes))  # modules that cloudpickle cannot carry


class _Pickler(cloudpickle.Pickler):
    """Plain tensors travel beside the pickle, those on a GPU as copies on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # as it is: cloudpickle would forget the file's name
            return marshal.loads, (marshal.dumps(obj),)
        if type(obj) in _MODULE_LIKE:  # a name in a function, `m.ops()`, reads as one of torch's
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            obj = obj.cpu()
            if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
                return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.numel():
            return _reduce(obj)
        return super().reducer_override(obj)


def _reduce(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple]:
    """Only the elements travel, not the storage that they may be a view of."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = dense.numel() * dense.element_size()
    memory = (ctypes.c_char * nbytes).from_address(dense.data_ptr())
    memory.owner = dense  # type: ignore[attr-defined]  # the buffer keeps the tensor alive
    buffer = pickle.PickleBuffer(memory)
    return _rebuild, (buffer, dense.dtype, tuple(dense.shape), tensor.requires_grad)


def _rebuild(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).requires_grad_(requires_grad)


Message = tuple[bytes, list[pickle.PickleBuffer]]


def pack(obj: Any) -> Message:
    """The pickle and the tensors beside it. Raises what pickling raises."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return stream.getvalue(), buffers


def send(connection: Connection, message: Message) -> None:
    """Send a packed object."""
    head, buffers = message
    views = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps([view.nbytes for view in views]))
    connection.send_bytes(head)
    for view in views:
        sent = 0
        while sent < view.nbytes:
            sent += os.write(connection.fileno(), view[sent : sent + PIECE_NBYTES])


def receive(connection: Connection) -> Message:
    """A packed object, not unpacked yet. Raises EOFError when the other end is gone."""
    sizes = pickle.loads(connection.recv_bytes())
    head = connection.recv_bytes()
    buffers = [bytearray(nbytes) for nbytes in sizes]
    for buffer in buffers:
        _read_into(connection.fileno(), memoryview(buffer))
    return head, [pickle.PickleBuffer(buffer) for buffer in buffers]


def _read_into(fd: int, view: memoryview) -> None:
    """Straight into place: `Connection.recv_bytes` would make a bytes object per piece."""
    while view.nbytes:
        got = os.readv(fd, [view])
        if not got:
            raise EOFError("the other end closed in the middle of a tensor")
        view = view[got:]


def unpack(message: Message) -> Any:
    """The object; its tensors own the received memory."""
    head, buffers = message
    return pickle.loads(head, buffers=buffers)
