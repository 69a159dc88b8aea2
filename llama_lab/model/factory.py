"""Factories of components: classes or functions, of which some arguments may be set already."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any


def call(factory: Callable[..., Any], **sizes: Any) -> Any:
    """Call `factory` with those of `sizes` that it accepts and that are not set already."""
    return factory(**{name: size for name, size in sizes.items() if takes(factory, name)})


def takes(factory: Callable[..., Any], name: str) -> bool:
    """Whether a factory accepts an argument. A class's `**kwargs` go to its base; a function's accept any."""
    if isinstance(factory, partial):
        return name not in factory.keywords and takes(factory.func, name)
    is_class = isinstance(factory, type)
    functions = [vars(kind).get("__init__") for kind in factory.mro()] if isinstance(factory, type) else [factory]
    for function in filter(None, functions):
        parameters = signature(function).parameters
        if name in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return not is_class
