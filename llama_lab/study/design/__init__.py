"""From a design to the runs of a study. The designs are the targets of `conf/study/`."""

from .continued import Extend as Extend
from .continued import Uptrain as Uptrain
from .designs import AddOne as AddOne
from .designs import Context as Context
from .designs import Depth as Depth
from .designs import Factorial as Factorial
from .designs import Families as Families
from .designs import KVHeads as KVHeads
from .designs import Ladder as Ladder
from .designs import LearningRate as LearningRate
from .designs import LeaveOneOut as LeaveOneOut
from .designs import Recipes as Recipes
from .options import Options as Options
from .scaling import Scaling as Scaling
