"""Profile a few training steps with PyTorch's profiler."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import profile, schedule

from llama_lab.util.files import discard, replace_text, replacing

from .monitor import SLOW_STEPS, Monitor

STEPS = 5
TRACE, TABLE = "profile.json", "profile.txt"
OPERATORS = 20  # rows of the table


class Profile(L.Callback):
    """Writes a Chrome trace of `STEPS` steps, after the first `SLOW_STEPS` of a process, and a table of its operators.

    No speed includes these steps, nor the time in which the files are written. Use it on one rank. If training ends
    earlier, they hold the steps until then; if it ends before the first of them, there are none.
    """

    def __init__(self) -> None:
        self._profile: profile | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Delete the files of an earlier session, and begin."""
        self.folder, self.monitor = Path(trainer.default_root_dir), Monitor.of(trainer)
        self.monitor.slow_steps = SLOW_STEPS + STEPS
        for name in (TRACE, TABLE):
            discard(self.folder / name)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all levels: PyTorch would tell that it starts and stops
        self._device = pl_module.device.type
        steps = schedule(wait=SLOW_STEPS - 1, warmup=1, active=STEPS, repeat=1)
        self._profile = profile(schedule=steps, on_trace_ready=self._write)
        self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before an optimizer step: begin it in the trace, too."""
        assert self._profile is not None
        with self.monitor.stopwatch.paused():
            if trainer.global_step == self._first_step:
                self._profile.start()
            else:
                self._profile.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End a profile that is not over yet."""
        with self.monitor.stopwatch.paused():
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same, so that a later run of this process may have one."""
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            ended, self._profile = self._profile, None
            ended.stop()

    def _write(self, ended: profile) -> None:
        """Write both files."""
        with replacing(self.folder / TRACE) as trace:
            ended.export_chrome_trace(str(trace))
        order = "self_cpu_time_total" if self._device == "cpu" else "self_device_time_total"
        replace_text(self.folder / TABLE, ended.key_averages().table(sort_by=order, row_limit=OPERATORS))


def profile_message(folder: Path) -> str:
    """Where the profile of the run in a folder is, in one line."""
    if not (folder / TABLE).exists():
        return f"no profile: the run had no more than {SLOW_STEPS} steps left"
    return f"the profile is in {folder / TRACE}, for https://ui.perfetto.dev; its operators are in {TABLE} beside it"
