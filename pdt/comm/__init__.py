"""What ranks say to each other: counted, put on an emulated wire, built by hand."""

from pdt.comm.backend import init
from pdt.comm.cost import Link
from pdt.comm.meter import meter
from pdt.comm.record import Record, Totals

__all__ = ["Link", "Record", "Totals", "init", "meter"]
