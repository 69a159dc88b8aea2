"""What the jobs of a sweep return."""

from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the jobs of a sweep return to Hydra's own sweeper, in commands inside this process."""
    values: list[Any] = []
    instantiate = Plugins.instantiate_sweeper

    def instantiate_watched(*arguments: Any, **settings: Any) -> Sweeper:
        sweeper = instantiate(*arguments, **settings)
        sweep = sweeper.sweep

        def watched(arguments: list[str]) -> Any:
            batches = sweep(arguments)
            for batch in batches:
                values.extend(job.return_value for job in batch)
            return batches

        monkeypatch.setattr(sweeper, "sweep", watched)
        return sweeper

    monkeypatch.setattr(Plugins, "instantiate_sweeper", instantiate_watched)
    return values
