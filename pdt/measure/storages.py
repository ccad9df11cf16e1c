"""The log behind the ledger: every storage from first sight to death, and its replay by kind.

Events say only "this storage now has so many bytes, and the graph keeps it (or not)". What kind of
memory it is may be known later than its birth: a gradient is made as a nameless temporary, and an
activation is saved after it was computed. So kinds belong to storages, and figures come from a
replay of the log with the kinds known by then.
"""

import time
import weakref
from collections.abc import Iterator
from functools import partial

import torch

KINDS = ("parameters", "gradients", "optimizer states", "activations", "buckets", "other")


class Storage:
    """One storage: its bytes now, its kind as far as known, and how often the graph keeps it."""

    __slots__ = ("first_save", "kind", "kind_weight", "nbytes", "places", "ref", "saves")

    def __init__(self, device: torch.device) -> None:
        self.places = {device.type, "device"}
        self.nbytes = 0
        self.kind: str | None = None
        self.kind_weight = 0
        self.saves = 0
        self.first_save = 0  # number of the event before which it counts as saved, too
        self.ref: weakref.ref[torch.UntypedStorage] | None = None


class Event:
    """From `time_s` on, `storage` has `nbytes`; `saved`: the graph keeps it for backward."""

    __slots__ = ("nbytes", "saved", "storage", "time_s")

    def __init__(self, time_s: float, storage: Storage, nbytes: int, saved: bool) -> None:
        self.time_s = time_s
        self.storage = storage
        self.nbytes = nbytes
        self.saved = saved


class StorageLog:
    """Follows storages by weak references, so that it keeps none alive."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._alive: dict[int, Storage] = {}  # by the id of the storage's Python object

    def see(self, tensor: torch.Tensor) -> Storage:
        """The entry of this tensor's storage, new or with its size read again."""
        untyped = tensor.untyped_storage()
        key = id(untyped)
        storage = self._alive.get(key)
        if storage is None:
            storage = self._alive[key] = Storage(untyped.device)
            storage.ref = weakref.ref(untyped, partial(self._died, storage, key))
        nbytes = untyped.nbytes()
        if nbytes != storage.nbytes:
            self._resized(storage, nbytes)
        return storage

    def reread(self, untyped: torch.UntypedStorage) -> None:
        """Read the size of one storage again, if the log knows it."""
        storage = self._alive.get(id(untyped))
        if storage is not None:
            self._resized(storage, untyped.nbytes())

    def reread_sizes(self) -> None:
        """Notice resizes made where no operation of torch shows them."""
        for storage in list(self._alive.values()):
            untyped = None if storage.ref is None else storage.ref()
            if untyped is not None:
                self._resized(storage, untyped.nbytes())

    def name(self, storage: Storage, kind: str, weight: int) -> None:
        """Give `storage` its kind, for all its life, unless a weightier word was spoken."""
        if weight > storage.kind_weight:
            storage.kind, storage.kind_weight = kind, weight

    def lies_on_host(self, storage: Storage) -> None:
        """It belongs to the host of the device, for all its life, also where both are a CPU."""
        storage.places = storage.places - {"device"} | {"host"}

    def save(self, storage: Storage) -> None:
        """The graph now keeps `storage`; the first time this holds from its first sight on."""
        storage.saves += 1
        if storage.saves == 1:
            if storage.first_save == 0:
                storage.first_save = len(self.events)
            self._note(storage)

    def release(self, *storages: Storage) -> None:
        """The graph dropped one hold on each."""
        for storage in storages:
            storage.saves -= 1
            if storage.saves == 0 and storage.ref is not None:
                self._note(storage)

    def close(self) -> None:
        """Stop following; the log stays as it is."""
        for storage in list(self._alive.values()):  # another thread may drop one meanwhile
            storage.ref = None  # and with the reference goes its callback
        self._alive.clear()

    def replay(self, place: str | None = None) -> Iterator[tuple[float, dict[str, int]]]:
        """(time, bytes by kind) after each event, of what lies in this place or of all.

        The dict is the same object every time: copy it to keep it.
        """
        totals = dict.fromkeys(KINDS, 0)
        shown: dict[Storage, tuple[str, int]] = {}
        for number, event in enumerate(self.events):
            storage = event.storage
            if place is None or place in storage.places:
                saved = event.saved or number < storage.first_save
                kind = storage.kind or ("activations" if saved else "other")
                old_kind, old_nbytes = shown.get(storage, (kind, 0))
                totals[old_kind] -= old_nbytes
                totals[kind] += event.nbytes
                shown[storage] = (kind, event.nbytes)
            yield event.time_s, totals

    def _resized(self, storage: Storage, nbytes: int) -> None:
        if nbytes != storage.nbytes:
            storage.nbytes = nbytes
            self._note(storage)

    def _note(self, storage: Storage) -> None:
        event = Event(time.perf_counter(), storage, storage.nbytes, storage.saves > 0)
        self.events.append(event)

    def _died(self, storage: Storage, key: int, _ref: object) -> None:
        if self._alive.get(key) is storage:
            self._alive.pop(key, None)
        storage.ref = None
        self._resized(storage, 0)
