"""From a design to the runs of a study. The designs are the targets of `conf/study/`."""

from .continued import Extend, Uptrain
from .designs import AddOne, Context, Depth, Factorial, KVHeads, Ladder, LeaveOneOut, Recipes
from .options import Options
from .scaling import Scaling

__all__ = [
    "AddOne",
    "Context",
    "Depth",
    "Extend",
    "Factorial",
    "KVHeads",
    "Ladder",
    "LeaveOneOut",
    "Options",
    "Recipes",
    "Scaling",
    "Uptrain",
]
