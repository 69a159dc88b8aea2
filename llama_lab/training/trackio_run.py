"""A run of Trackio's: a dashboard in W&B's manner, in a database on this machine. Needs the extra `trackio`."""

from collections.abc import Iterable, Sequence
from typing import Any

from llama_lab.runs.folder import TRACKIO_ID, RunFolder
from llama_lab.runs.metrics import MetricsLogger
from llama_lab.util.files import replace_text


class TrackioMetrics(MetricsLogger):
    """Logs to a new run of Trackio's, with tokens as the step.

    It takes the place of the one whose id `folder` has kept. history: the rows before the checkpoint that training goes
    on from, with which it begins. Trackio can also resume a run, but finds it by its name, which need not be unique.
    """

    def __init__(
        self,
        folder: RunFolder,
        project: str,
        name: str,
        group: str,
        config: dict[str, Any],
        history: Sequence[dict[str, float]],
    ) -> None:
        super().__init__()
        import trackio

        kept = folder.path / TRACKIO_ID
        if kept.exists():
            try:
                earlier: Iterable[Any] = trackio.Api().runs(project)
            except ValueError:  # the project was killed before its first row, or deleted since
                earlier = []
            for run in earlier:
                if run.id == kept.read_text():
                    run.delete()
        self.run = trackio.init(
            project, name, group, config=config, embed=False, auto_log_cpu=False, auto_log_gpu=False
        )
        replace_text(kept, self.run.id)
        for row in history:
            self.log_metrics(row)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row at its tokens."""
        self.run.log(metrics, step=int(metrics["tokens"]))
