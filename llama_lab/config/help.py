"""`--help` in half of its time."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.object_type import ObjectType


def share_config_sources() -> None:
    """Let Hydra list the options of all groups from one copy of its config sources; `--help` makes 130 otherwise."""

    @lru_cache
    def sources(loader: ConfigLoaderImpl, config: str | None, overrides: tuple[str, ...]) -> CachingConfigRepository:
        return loader._parse_overrides_and_create_caching_repo(config, list(overrides))[1]

    def get_group_options(
        self: ConfigLoaderImpl,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: Sequence[str] | None = None,
    ) -> Any:
        return sources(self, config_name, tuple(overrides or ())).get_group_options(group_name, results_filter)

    ConfigLoaderImpl.get_group_options = get_group_options  # type: ignore[method-assign]
