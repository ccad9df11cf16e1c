"""One clock for host and device: `perf_counter` on CPU, stream events on CUDA."""

import time

import torch
from torch import nn

Stamp = float | torch.cuda.Event


class Clock:
    """Takes stamps cheaply and turns them into `perf_counter` seconds later, in one go.

    On CUDA a stamp is an event on the current stream, so it marks when the device gets there, not
    when the host asked; the first synchronisation ties the device's time to the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._base = self._event()
            self._base.synchronize()
        self._base_s = time.perf_counter()

    @classmethod
    def of(cls, model: nn.Module) -> "Clock":
        """The clock of the device that holds the first parameter of `model` (CPU if none)."""
        first = next(model.parameters(), None)
        return cls(torch.device("cpu") if first is None else first.device)

    def stamp(self) -> Stamp:
        return time.perf_counter() if self._base is None else self._event()

    def seconds(self, stamps: list[Stamp]) -> list[float]:
        """The stamps as `perf_counter` seconds; waits for the device to reach the last."""
        if self._base is not None:
            torch.cuda.synchronize(self.device)
        return [self._second(stamp) for stamp in stamps]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _second(self, stamp: Stamp) -> float:
        if isinstance(stamp, float) or self._base is None:
            return float(stamp)  # type: ignore[arg-type]  # without a base, stamps are floats
        return self._base_s + self._base.elapsed_time(stamp) / 1e3
