"""Training what does not fit on the device: on the host, and in files.

>>> from pdt.offload import OffloadedAdamW
>>> optimizer = OffloadedAdamW(model.parameters(), lr=1e-3)     # its states live on the host
"""

from pdt.offload.activations import offload_activations
from pdt.offload.adam import HostAdamW
from pdt.offload.bus import Bus
from pdt.offload.cuda_bus import bus_of
from pdt.offload.files import TensorFiles
from pdt.offload.nvme import SwapWindow
from pdt.offload.optimizer import OffloadedAdamW, OffloadedOptimizer
from pdt.offload.scaler import OffloadedGradScaler
from pdt.offload.selective import recompute_blocks
from pdt.offload.streamed import StreamedLinear

__all__ = [
    "Bus",
    "HostAdamW",
    "OffloadedAdamW",
    "OffloadedGradScaler",
    "OffloadedOptimizer",
    "StreamedLinear",
    "SwapWindow",
    "TensorFiles",
    "bus_of",
    "offload_activations",
    "recompute_blocks",
]
