"""Compose configs and build models faster: what libraries do again and again is done once, or in fewer steps."""

import pickle
from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import hydra
import omegaconf.base
from hydra._internal import defaults_list
from omegaconf import AnyNode, DictConfig, OmegaConf, grammar_parser
from omegaconf.base import Box, Metadata, Node

from llama_lab.config.components import CONF_DIR
from llama_lab.model import mixer

CONFIGS = (str(CONF_DIR), str(Path(hydra.__file__).parent))


def work_faster(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace functions of libraries by ones that return the same; `replace` is `setattr` or one that is undone."""
    known: dict[str, bytes] = {}
    load, choices = OmegaConf.load, defaults_list._create_interpolation_map

    def read_once(file: Any) -> Any:
        """A YAML file of ours or of Hydra's."""
        path = str(getattr(file, "name", file))
        if not path.startswith(CONFIGS):
            return load(file)
        if path not in known:
            known[path] = pickle.dumps(load(file))
        return pickle.loads(known[path])

    def choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig | None:
        """What defaults may refer to, where they do."""
        refer = any(default.is_interpolation() for default in defaults if not default.is_self())
        return choices(overrides, defaults, self_added) if refer else None

    def copied_node(node: AnyNode, memo: dict[int, Any]) -> AnyNode:
        """A value beside its metadata; OmegaConf would make another node first."""
        copied = object.__new__(type(node))
        vars(copied).update(vars(node), _metadata=deepcopy(node._metadata, memo), _flags_cache=None)
        return copied

    def copied_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
        """What may be changed is copied; `deepcopy` would go through the types, too."""
        copied = object.__new__(type(metadata))
        kept = deepcopy(metadata.resolver_cache, memo) if metadata.resolver_cache else defaultdict(dict)
        vars(copied).update(vars(metadata), flags=copy(metadata.flags), resolver_cache=kept)
        return copied

    def re_parent(node: Box) -> None:
        """Give the values in a merged node their parents; what they cached of their flags goes, on any level."""
        content = vars(node)["_content"]
        values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else [content]
        for value in (one for one in values if isinstance(one, Node)):
            vars(value).update(_parent=node, _flags_cache=None)
            if isinstance(value, Box):
                value._re_parent()

    replace(OmegaConf, "load", read_once)
    replace(Box, "_re_parent", re_parent)
    replace(AnyNode, "__deepcopy__", copied_node)
    replace(Metadata, "__deepcopy__", copied_metadata)
    replace(mixer, "signature", cache(signature))
    replace(defaults_list, "_create_interpolation_map", choices_if_needed)
    replace(omegaconf.base, "parse", cache(grammar_parser.parse))
