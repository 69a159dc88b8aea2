"""TorchMetrics without its metrics: Lightning imports it for two base classes, and pays for SciPy, Matplotlib and more.

That is half of the time that Lightning takes to import (TorchMetrics 1.9; its issue 3457 asks for what is done here).
"""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

NAME = "torchmetrics"
USED = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}  # by Lightning: its modules


def defer_torchmetrics() -> None:
    """Make `import torchmetrics` run its `__init__.py` only when more is asked of it than Lightning does.

    Does nothing where it has been imported already.
    """
    spec = None if NAME in sys.modules else find_spec(NAME)
    if spec is None or spec.loader is None:
        return
    package, loader = module_from_spec(spec), spec.loader

    def look_up(name: str) -> Any:
        if name in USED:
            import_module(f"{NAME}.utilities")  # first, since it and the base classes import each other
            return getattr(import_module(f"{NAME}.{USED[name]}"), name)
        if name.startswith("__") and name != "__all__":  # code that walks over all modules looks for such
            raise AttributeError(name)
        vars(package).pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    vars(package).update(__getattr__=look_up, _logger=logging.getLogger(NAME))
    sys.modules[NAME] = package
