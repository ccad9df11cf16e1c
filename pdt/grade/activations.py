"""Lesson 12's exercises: checkpointing with random state, offload by hooks, a peak in segments."""

from __future__ import annotations

from pdt.grade.checkpointed import CHECKPOINT
from pdt.grade.offload_hooks import OFFLOAD_HOOKS
from pdt.grade.segment_peak import SEGMENT_PEAK

EXERCISES = (CHECKPOINT, OFFLOAD_HOOKS, SEGMENT_PEAK)
