"""The layers of a model on several ranks, and schedules that keep these busy."""

from pdt.pipeline_parallel.replicas import average_gradients, sum_tied_gradients
from pdt.pipeline_parallel.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from pdt.pipeline_parallel.stage import Pipeline

__all__ = [
    "Action",
    "Pipeline",
    "Schedule",
    "average_gradients",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "sum_tied_gradients",
    "zb_h1",
    "zb_h2",
]
