"""What the exercises of lesson 14 must do: walk with k buffers, outlive a crash, predict stalls."""

from pdt.grade.safe_files import SAFE_FILES
from pdt.grade.walk_time import WALK_TIME
from pdt.grade.window_walk import WALK

EXERCISES = (WALK, SAFE_FILES, WALK_TIME)
