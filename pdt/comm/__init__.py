"""What ranks say to each other: counted, put on an emulated wire, built by hand."""

from pdt.comm.backend import init
from pdt.comm.meter import meter
from pdt.comm.record import Record, Totals
from pdt.comm.topology import Link

__all__ = ["Link", "Record", "Totals", "init", "meter"]
