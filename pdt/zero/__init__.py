"""ZeRO: what data parallelism holds n times, each rank holds 1/n of.

Rajbhandari et al. 2020 (arXiv:1910.02054): stage 1 shards the optimizer's states, stage 2 the
gradients too, stage 3 the parameters as well. `zero1` and `zero2` are optimizers, `zero3` goes
around a module, and has beside it `no_sync`, `clip_grad_norm_`, `gathered`,
`register_forward_method` and `set_prefetch`; `deferred` builds what is too large for one rank.
`bucket` is a flat buffer of parameters and this rank's shard of it, `update` the
optimizer of that shard, `states` what is saved and loaded.
"""

from pdt.zero.scaler import ShardedGradScaler
from pdt.zero.zero1 import Zero1
from pdt.zero.zero2 import Zero2
from pdt.zero.zero3 import fully_shard

__all__ = ["ShardedGradScaler", "Zero1", "Zero2", "fully_shard"]
