"""ZeRO-Offload: the optimizer's states live, and are stepped, on the host.

Ren et al. 2021 (arXiv:2101.06840): the device keeps the parameters in 16 bits; a gradient leaves
for the host as soon as backward has made it, the host steps full-precision masters, and parameters
return. So 2 bytes a parameter go each way, the least that any placement needs which frees the
device of states and gradients (section 3), and the device keeps 2 bytes of 16.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.norm import norm_of, norm_over_ranks
from pdt.measure.timeline import Span
from pdt.offload.adam import HostAdamW
from pdt.offload.bus import Bus
from pdt.offload.files import TensorFiles
from pdt.offload.host_bucket import HostBucket
from pdt.offload.hosted import HostedOptimizer
from pdt.offload.in_forward import wait_in_forward
from pdt.offload.late import Late
from pdt.offload.returns import Return, Returns, Update


class OffloadedOptimizer(HostedOptimizer):
    """Steps parameters of a device on its host, by an optimizer of `optimizer_class`.

    The device holds the parameters, and of the gradients what has not left yet: at most two
    transfers of `transfer_cap_mb` MiB are under way, and `.grad` is None after. The host holds a
    full-precision master of each parameter, its gradient, and the states. Several backwards before
    a step add up there. `step` uses the gradients up, as `zero_grad` does.

    Groups, schedules, closures and state dicts are as torch's: `state_dict()` is what the plain
    optimizer would save, and each master as "master_param" besides; either loads into the other.
    `defaults` go to `optimizer_class`, which must be elementwise.

    bus: the way to the host; the device's own, or an emulated one, by default.
    during_backward: let gradients leave as backward makes them. Pass False where somebody else
        finishes them (torch's or pdt's DDP): they leave in `step` then.
    delay_after: from so many steps on, each update is applied one step late, and is computed while
        the device does the next forward and backward (section 5.2); None for never.

    files: keep masters and states there, and in memory only the three buckets that are being read,
        stepped and written; the gradients stay in memory. For Adam and its kin, whose states begin
        at zero (`HostAdamW`, torch's Adam and AdamW).

    With stage 3, give it the sharded module's parameters, whose gradients leave in `step`. With
    stages 1 and 2, it is what they step: `Zero1(params, OffloadedAdamW, bus=bus, lr=...)`.

    Raises ValueError, with the name, for parameters with gaps or overlaps in memory, and for sparse
    gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer] = HostAdamW,
        *,
        bus: Bus | None = None,
        transfer_cap_mb: float = 8.0,
        during_backward: bool = True,
        delay_after: int | None = None,
        files: TensorFiles | None = None,
        **defaults: Any,
    ) -> None:
        self.delay_after = delay_after
        self.host_spans: deque[Span] = deque(maxlen=10_000)  # of the latest updates
        self._late: Late[Update] = Late()
        self._waits_in_forward = False
        self._scale = 1.0  # by which the gradients are divided in the next step
        self._steps = 0
        super().__init__(
            params,
            optimizer_class,
            bus=bus,
            transfer_cap_mb=transfer_cap_mb,
            during_backward=during_backward,
            files=files,
            **defaults,
        )
        self._returns = Returns(self.bus, self._has_returned)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self._scale = 1.0

    def unscale(self, scale: float) -> bool:
        """The next step divides the gradients by `scale`; whether all of them are finite.

        A power of two, as a loss scaler's, costs no accuracy.
        """
        finite = all(
            bool(torch.linalg.vector_norm(grad, float("inf")).isfinite())
            for grad in self.grads()
            if grad.numel()
        )
        self._scale *= scale
        return finite

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        group: dist.ProcessGroup | None = None,
        over_ranks: bool = False,
    ) -> Tensor:
        """Clip as torch's, by what the next step divides by; returns the norm before, on the host.

        `over_ranks`: the parameters are this rank's shards, and the norm that of all ranks of
        `group`, which all call it. A norm that is not finite clips nothing: skip that step. Raises
        ValueError for a `max_norm` that is not above 0.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} must be above 0")
        grads, host = self.grads(), torch.device("cpu")
        if over_ranks:
            norm = norm_over_ranks(grads, norm_type, group, device=host)
        else:
            norm = norm_of(grads, norm_type, device=host)
        norm = norm / self._scale
        if norm.isfinite():
            self._scale *= max(1.0, float(norm + 1e-6) / max_norm)
        return norm

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The host steps each bucket while others are on their way, to it or back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._send_rest()
        self._apply_late()
        if not self._waits_in_forward:
            self._returns.wait_for_all()
        is_late = self.delay_after is not None and self._steps >= self.delay_after
        self._take_over()
        self._plan_reads()
        buckets = self._to_step()
        if is_late or self._waits_in_forward:
            self._arrivals.settle_all()
        if is_late:
            self._late.start([self._update_of(bucket, apart=True) for bucket in buckets])
        elif self._waits_in_forward:
            for bucket in buckets:
                self._returns.expect(bucket, self._late.submit(self._and_return(bucket)))
        else:
            self._step_now(buckets)
        self._steps, self._scale = self._steps + 1, 1.0
        return loss

    def synchronize(self) -> None:
        """The device's parameters are those after the last step, late or not."""
        self._apply_late()
        self._returns.wait_for_all()

    def wait_for(self, param: Tensor) -> None:
        """Return when this parameter is that after the last step, unless that is late."""
        if param in self._place:
            self._wait_for(self._place[param][0])

    def wait_in_forward(self, model: nn.Module) -> None:
        """From now on `step` does not wait for the parameters to return: a part of `model` does, in
        its forward, for its own, and `model.state_dict()` for all.

        So the next forward hides the host's step and the way back. Parameters that are used outside
        of the forward of the module that holds them want a `synchronize()` before. Raises
        ValueError for sharded parameters, which are gathered before anybody's forward.
        """
        wait_in_forward(model, self)
        self._waits_in_forward = True

    def _to_step(self) -> list[HostBucket]:
        """What has gradients, in the order in which they come, or in that of the next forward."""
        came = [bucket for bucket in self.buckets if bucket.came]
        return came[::-1] if self._waits_in_forward else came

    def _step_now(self, buckets: Sequence[HostBucket]) -> None:
        for bucket in buckets:
            self._arrivals.settle(bucket)
            self._returns.expect(bucket, self._and_return(bucket)())
        self._returns.wait_for_all()

    def _apply_late(self) -> None:
        """What was computed since the last step returns."""
        updates = self._late.take()
        if updates:
            self._returns.wait_for_all()
        for update in updates:
            send = partial(self._returns.send, update)
            coming = self._late.submit(send) if self._waits_in_forward else send()
            self._returns.expect(update[0], coming)

    def _and_return(self, bucket: HostBucket) -> Callable[[], Return]:
        update, send = self._update_of(bucket), self._returns.send
        return lambda: send(update())

    def _update_of(self, bucket: HostBucket, *, apart: bool = False) -> Callable[[], Update]:
        """What the host is to do with the gradients that have come; `apart`: while others come."""
        used, scale = sorted(bucket.came), self._scale
        flat_grads = bucket.swap_grads() if apart else bucket.flat_grads
        group = self.param_groups[self._group_of[bucket]]
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        bucket.came.clear()

        def update() -> Update:
            start_s = time.perf_counter()
            pairs = bucket.step(flat_grads, used, settings, scale)
            end_s = time.perf_counter()
            self.host_spans.append(Span("optimizer", start_s, end_s, "host", "optimizer"))
            return bucket, used, pairs

        return update

    def _has_returned(self, bucket: HostBucket, params: Sequence[int]) -> None:
        for i in params:
            param = bucket.params[i]
            bucket.versions[i] = param._version
            self.state[param] = self._seen[param] = bucket.state_of(i)

    def _wait_for(self, bucket: HostBucket) -> None:
        self._returns.wait_for(bucket)

    def _take_over(self) -> None:
        """What others have written meanwhile: states that were loaded, parameters."""
        for bucket in self.buckets:
            for i in bucket.came:
                state = self.state.get(bucket.params[i])
                if state is not self._seen[bucket.params[i]]:
                    bucket.set_state(i, state or {})
            versions = zip(bucket.params, bucket.versions, strict=True)
            is_written = [param._version != version for param, version in versions]
            written = [i for i in bucket.came if is_written[i]]
            if written and bucket not in self._returns:
                self._arrivals.settle(bucket)
                bucket.follow(written)


class OffloadedAdamW(OffloadedOptimizer):
    """`OffloadedOptimizer` with AdamW, for those who take an optimizer's class, as `Zero1` does."""

    def __init__(self, params: Iterable[Any], **arguments: Any) -> None:
        super().__init__(params, HostAdamW, **arguments)
