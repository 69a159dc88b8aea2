"""From a question to the runs that answer it. The designs themselves are the targets of `conf/study/`."""

from .designs import AddOne, Context, Depth, Factorial, KVHeads, Ladder, LeaveOneOut, Recipes

__all__ = ["AddOne", "Context", "Depth", "Factorial", "KVHeads", "Ladder", "LeaveOneOut", "Recipes"]
