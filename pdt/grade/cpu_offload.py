"""What the exercises of lesson 13 must do: place, carry during backward, update one step late."""

from pdt.grade.best_placement import BEST_PLACEMENT
from pdt.grade.delayed_update import DELAYED_UPDATE
from pdt.grade.offloaded_step import OFFLOADED_STEP

EXERCISES = (BEST_PLACEMENT, OFFLOADED_STEP, DELAYED_UPDATE)
