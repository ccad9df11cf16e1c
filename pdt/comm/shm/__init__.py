"""A backend of torch.distributed for the ranks of one machine, in Python, over shared memory."""

from pdt.comm.shm.group import ShmGroup

__all__ = ["ShmGroup"]
