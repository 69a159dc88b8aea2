"""How a block connects its parts, read off its forward pass, so that a picture cannot say otherwise."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import fx, nn

ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
SCALE = "\u00d7"  # a chain's item for a function between its parts, which scales
UNSEEN = (nn.Dropout, nn.Identity)  # modules that are no part of a picture


@dataclass(frozen=True)
class Sum:
    """A sum of chains of parts that start at one point.

    skip: of the chain without parts, the residual connection: empty, or SCALE; None if there is none. shared: the
    parts before the other chains part. branches: these chains; items are names of a block's children, or SCALE.
    """

    skip: tuple[str, ...] | None
    shared: tuple[str, ...]
    branches: tuple[tuple[str, ...], ...]


Stage = str | Sum


class Tracer(fx.Tracer):
    """Traces a block, whose children are parts."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every child is a part."""
        return True


def wiring(block: nn.Module) -> tuple[Stage, ...] | None:
    """The stages from a block's input to its output; None for a forward pass that cannot be traced, or is no chain."""
    try:
        graph = Tracer().trace(block, concrete_args={"state": None})
        start = next(node for node in graph.nodes if node.op == "placeholder")
        (end,) = (node.args[0] for node in graph.nodes if node.op == "output")
        return tuple(_stages(block, start, end))
    except Exception:  # a user's forward pass may do anything with what is no tensor
        return None


def _stages(block: nn.Module, start: fx.Node, end: fx.Node) -> list[Stage]:
    """The stages between two nodes."""
    stages: list[Stage] = []
    node = end
    while node is not start:
        if node.op == "call_module":
            if not isinstance(block.get_submodule(str(node.target)), UNSEEN):
                stages.append(str(node.target))
            node = node.all_input_nodes[0]
        elif node.target in ADD:
            operands = _operands(node)
            node = max(set.intersection(*map(_ancestors, operands)))
            stages.append(_sum([_stages(block, node, one) for one in operands]))
        else:
            (node,) = (one for one in node.all_input_nodes if one.op != "get_attr")
            stages.append(SCALE)
    return stages[::-1]


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that a sum adds up; for a sum that only it uses, what that adds up."""
    return [
        operand
        for one in node.all_input_nodes
        for operand in (_operands(one) if one.target in ADD and len(one.users) == 1 else [one])
    ]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it depends on, but for parameters."""
    return {node}.union(*(_ancestors(one) for one in node.all_input_nodes if one.op != "get_attr"))


def _sum(chains: Sequence[Sequence[Stage]]) -> Sum:
    """Raises ValueError for a chain that has a sum in it, or a second one without parts."""
    named = [tuple(one for one in chain if isinstance(one, str)) for chain in chains]
    skips = [chain for chain in named if {*chain} <= {SCALE}]
    branches = [chain for chain in named if chain not in skips]
    if list(map(len, named)) != list(map(len, chains)) or len(skips) > 1 or not branches:
        raise ValueError("is no residual sum")
    same = takewhile(lambda items: len({*items}) == 1, zip(*branches, strict=False))
    shared = tuple(items[0] for items in same) if len(branches) > 1 else ()
    return Sum(skips[0] if skips else None, shared, tuple(chain[len(shared) :] for chain in branches))
