"""The instruments: what a rank did and when, which bytes it holds, and figures worth trusting."""

from pdt.measure.memory import Ledger
from pdt.measure.modules import module_spans
from pdt.measure.saved import SavedActivations, SavedTensor, saved_activations
from pdt.measure.timeline import Span, Timeline

__all__ = [
    "Ledger",
    "SavedActivations",
    "SavedTensor",
    "Span",
    "Timeline",
    "module_spans",
    "saved_activations",
]
