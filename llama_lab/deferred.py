"""TorchMetrics without its metrics: Lightning imports it for two base classes, and pays for SciPy, Matplotlib and more.

That is half of the time that Lightning takes to import (TorchMetrics 1.9; its issue 3457 asks for what is done here).
"""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

NAME = "torchmetrics"
PLOT = f"{NAME}.utilities.plot"
USED = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}  # by Lightning: its modules


def defer_torchmetrics() -> None:
    """Make `import torchmetrics` run its `__init__.py` only when more is asked of it than Lightning does.

    Does nothing where it has been imported already.
    """
    spec = None if NAME in sys.modules else find_spec(NAME)
    if spec is None or spec.loader is None or spec.origin is None:
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
    defer_plots(Path(spec.origin).with_name("utilities") / "plot.py")


def defer_plots(file: Path) -> None:
    """Make TorchMetrics' functions that plot, which its base classes import, run their module when one is called."""
    spec = spec_from_file_location(PLOT, file)
    assert spec is not None
    assert spec.loader is not None
    module, loader = module_from_spec(spec), spec.loader

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("_"):  # a type, which is an object where Matplotlib is missing, too
            return object

        def plot(*args: Any, **kwargs: Any) -> Any:
            if vars(module).pop("__getattr__", None):
                loader.exec_module(module)
            return getattr(module, name)(*args, **kwargs)

        return plot

    vars(module).update(__getattr__=look_up)
    sys.modules[PLOT] = module
