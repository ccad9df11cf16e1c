"""Lesson 11's exercises: a unit that gathers, uses and frees, its prefetch, and the peak."""

from __future__ import annotations

from pdt.grade.peak import PREDICT_PEAK
from pdt.grade.prefetch import PREFETCH
from pdt.grade.shard_unit import SHARD_UNIT

EXERCISES = (SHARD_UNIT, PREFETCH, PREDICT_PEAK)
