"""The ledger: live and peak bytes of a training step by kind, exact to the byte.

Parameters, gradients, optimizer states and activations in the sense of Rajbhandari et al. 2020,
section 3 (arXiv:1910.02054); buckets as in Li et al. 2020, section 3.2.3 (arXiv:2006.15704).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from pdt.measure.holders import put_first, several, with_inner
from pdt.measure.saved import watch_saved
from pdt.measure.storages import KINDS, StorageLog
from pdt.measure.table import text_table
from pdt.measure.tensors import plain_tensors, tensors_in
from pdt.measure.watch import Watch, is_watching, seen_resizes

# When two kinds claim one storage, the weightier wins: a gradient that is a view of a tagged bucket
# is in the bucket, and an nn.Parameter that an optimizer alone knows is a master copy.
_TAGGED, _PARAMETER, _GRADIENT, _STATE, _BY_TYPE = 5, 4, 3, 2, 1


class Ledger:
    """A context that follows every storage made or touched inside it, on whatever device.

    >>> with Ledger(model=model, optimizer=optimizer) as ledger:
    ...     loss = model(x).sum()
    ...     ledger.snapshot("after forward")
    ...     loss.backward()
    ...     optimizer.step()
    >>> print(ledger.table(), ledger.peak_total, ledger.peak()["activations"])

    A storage counts once and whole, whatever views it has (tied parameters, gradients inside a
    bucket), from its first sight until it dies or is resized to nothing. Kinds: *parameters* of
    `model`, and every `nn.Parameter` that an operation touches; *gradients*, the `.grad` of these
    models' parameters; *optimizer states* of `optimizer`, and parameters that only it holds (fp32
    master copies); *activations*, what the graph keeps for backward, from birth until it lets go;
    *buckets*, those that torch's DDP makes inside the ledger, and what `tag` names so; *other*, the
    rest: inputs, buffers, temporaries. `model` and `optimizer` may each be one or several. A model
    on the meta device is counted too, as what the step would take.

    Figures are of all that there is, or of one *place*: a type of device ("cpu", "cuda"), or "host"
    for what an offloading optimizer says is there by its `host_tensors`, and "device" for the rest.

    Not seen: scratch memory inside one operation, an allocator's rounding (see `allocator`), other
    threads than this one and its backwards, and older tensors until an operation touches them.
    Cost: about 50 microseconds an operation on one CPU core, half of it torch's for any dispatch
    mode: a step of four transformer blocks took 1.7 times as long at width 128, 5 times at width
    32, and the log grows by 100 bytes an event. So it is made for steps, not for runs.
    Raises RuntimeError when opened twice or inside another ledger, and where saved-tensor hooks are
    refused (torch.func).
    """

    def __init__(
        self, model: nn.Module | Iterable[nn.Module] | None = None, optimizer: Any = None
    ) -> None:
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._log = StorageLog()
        self._marks: list[tuple[str, int]] = []
        self._allocator: dict[str, dict[str, int]] = {}
        self._hooks = ExitStack()
        self._state = "new"
        self.watch(model, optimizer)

    def __enter__(self) -> "Ledger":
        if self._state != "new" or is_watching():
            raise RuntimeError(
                f"this ledger is {self._state} and may be opened once, not inside another: use "
                "snapshot(label) inside one ledger, or a new Ledger after it"
            )
        with self._hooks:  # undoes all of it if a line below raises
            self._hooks.callback(self._log.close)
            self._hooks.enter_context(seen_resizes(self._log))
            self._hooks.enter_context(watch_saved(self._keep))
            self._hooks.enter_context(Watch(self._log, _BY_TYPE))
            self._attach(self._models, self._optimizers)
            self._state = "open"
            for device in _cuda_devices():
                torch.cuda.reset_peak_memory_stats(device)
            self._scan()
            self._hooks = self._hooks.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            self._scan()
            self._allocator = self.allocator()
        finally:
            self._state = "closed"
            self._hooks.close()

    def watch(
        self, model: nn.Module | Iterable[nn.Module] | None = None, optimizer: Any = None
    ) -> None:
        """Take in more models and optimizers, also while open."""
        models, optimizers = several(model), several(optimizer)
        self._models += models
        self._optimizers += optimizers
        if self._state == "open":
            self._attach(models, optimizers)

    def tag(self, tensor: torch.Tensor, kind: str) -> None:
        """Say that this tensor's storage is of `kind` for all its life, whatever else it seems.

        In a communication hook of torch's DDP: `ledger.tag(bucket.buffer(), "buckets")`.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {KINDS}")
        self._name(tensor, kind, _TAGGED)

    def snapshot(self, label: str) -> dict[str, int]:
        """The live bytes now, also kept as a row of `table` and in `snapshots`."""
        live = self.live()
        self._marks.append((label, len(self._log.events)))
        return live

    @property
    def snapshots(self) -> list[tuple[str, dict[str, int]]]:
        """(label, bytes by kind) of each snapshot, with the kinds as known by now."""
        states = [dict.fromkeys(KINDS, 0), *(dict(totals) for _, totals in self._replay())]
        return [(label, states[number]) for label, number in self._marks]

    @property
    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """(`perf_counter` seconds, live bytes by kind) after each change."""
        return self.history()

    def history(self, place: str | None = None) -> list[tuple[float, dict[str, int]]]:
        """As `timeline`, of one place."""
        return [(time_s, dict(totals)) for time_s, totals in self._replay(place)]

    def live(self, place: str | None = None) -> dict[str, int]:
        """Live bytes by kind, now or at the end of the context."""
        last = deque(self._replay(place), maxlen=1)
        return dict(last[0][1]) if last else dict.fromkeys(KINDS, 0)

    def peak(self, place: str | None = None) -> dict[str, int]:
        """Bytes by kind at the first moment of the highest total."""
        best, best_total = dict.fromkeys(KINDS, 0), 0
        for _, totals in self._replay(place):
            if (total := sum(totals.values())) > best_total:
                best, best_total = dict(totals), total
        return best

    @property
    def peak_total(self) -> int:
        """The highest total of live bytes, over all devices."""
        return sum(self.peak().values())

    def allocator(self) -> dict[str, dict[str, int]]:
        """What CUDA's caching allocator says of each device since the context was entered.

        Empty on CPU. Entering resets the allocator's peaks. "allocated" exceeds the ledger's bytes
        by the rounding to 512 bytes and by what the libraries took for themselves.
        """
        if self._state == "closed":
            return self._allocator
        return {
            f"cuda:{device}": {
                "allocated": torch.cuda.memory_allocated(device),
                "peak allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "peak reserved": torch.cuda.max_memory_reserved(device),
            }
            for device in _cuda_devices()
        }

    def table(self) -> str:
        """Snapshots, the present and the peak as rows of bytes, a column per kind."""
        rows = [*self.snapshots, ("now" if self._state == "open" else "at exit", self.live())]
        rows.append(("peak", self.peak()))
        text = text_table(
            ["bytes", *KINDS, "total"],
            [[label, *totals.values(), sum(totals.values())] for label, totals in rows],
        )
        notes = [
            f"{device}: " + ", ".join(f"{name} {nbytes:,}" for name, nbytes in figures.items())
            for device, figures in self.allocator().items()
        ]
        return "\n".join([text, *notes])

    def _replay(self, place: str | None = None) -> Iterator[tuple[float, dict[str, int]]]:
        if self._state != "closed":
            self._scan()
        return self._log.replay(place)

    def _scan(self) -> None:
        """Read sizes and kinds of all that the models and optimizers hold now."""
        self._log.reread_sizes()
        parameters = [p for model in self._models for p in model.parameters()]
        for parameter in parameters:
            self._name(parameter, "parameters", _PARAMETER)
        for buffer in (b for model in self._models for b in model.buffers()):
            self._name(buffer, "other", 0)
        for optimizer in with_inner(self._optimizers):
            groups = getattr(optimizer, "param_groups", [])
            held = [p for group in groups for p in group["params"]]
            kind = "optimizer states" if self._models else "parameters"
            for tensor in held:
                self._name(tensor, kind, _STATE)
            for tensor in tensors_in(dict(getattr(optimizer, "state", {}))):
                self._name(tensor, "optimizer states", _STATE)
            parameters += held
            for bucket in getattr(optimizer, "buckets", ()):
                grads = [getattr(bucket, name, None) for name in ("shard_grad", "flat_grads")]
                for tensor in tensors_in(grads):
                    self._name(tensor, "gradients", _GRADIENT)
            for tensor in tensors_in(getattr(optimizer, "host_tensors", ())):
                self._log.lies_on_host(self._log.see(tensor))
        for parameter in parameters:
            self._name_gradient(parameter)

    def _attach(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        offloads = any(hasattr(o, "host_tensors") for o in with_inner(self._optimizers))
        for parameter in (p for module in models for p in module.parameters()):
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._name_gradient)
                self._hooks.callback(hook.remove)
                if offloads:  # it takes the gradient away in a hook of its own
                    put_first(parameter, hook.id)
        inner = (o for o in with_inner(optimizers) if isinstance(o, torch.optim.Optimizer))
        for stepper in inner:
            # before the step the gradients are complete, after it the states are there
            for register in (stepper.register_step_pre_hook, stepper.register_step_post_hook):
                self._hooks.callback(register(lambda *_: self._scan()).remove)

    def _name(self, tensor: torch.Tensor, kind: str, weight: int) -> None:
        for part in plain_tensors(tensor):
            self._log.name(self._log.see(part), kind, weight)

    def _name_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf and parameter.grad is not None:
            self._name(parameter.grad, "gradients", _GRADIENT)

    def _keep(self, tensor: torch.Tensor) -> Callable[[], None]:
        storages = [self._log.see(part) for part in plain_tensors(tensor)]
        for storage in storages:
            self._log.save(storage)
        return partial(self._log.release, *storages)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
