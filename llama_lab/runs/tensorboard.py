"""`llama-lab-tensorboard`: TensorBoard with the short names of runs instead of their folders."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensorboard import program

from llama_lab.util.errors import ConfigError

from .naming import short_names
from .record import every_run, read_record


def losses_first(app: Any, flags: Any) -> program.TensorBoardServer:
    """TensorBoard's server on a free port, whose printed address opens on losses."""
    server: program.TensorBoardServer = program.create_port_scanning_werkzeug_server(app, flags)
    url = server.get_url()
    server.get_url = lambda: f"{url}?tagFilter=loss"
    return server


def open_tensorboard(paths: Sequence[Path], flags: Sequence[str]) -> None:
    """Serve the runs below `paths` until the user stops it; `flags` are TensorBoard's.

    Raises ConfigError if there are none, or two of one name.
    """
    with TemporaryDirectory() as folder:
        link_runs(paths, Path(folder))
        server = program.TensorBoard(server_class=losses_first)
        server.configure(argv=["tensorboard", "--logdir", folder, *flags])
        server.main()


def link_runs(paths: Sequence[Path], folder: Path) -> None:
    """Fill `folder` with links to the events of every run, `norm=layernorm/seed=1`. Raises ConfigError."""
    found = dict.fromkeys(run for path in paths for run in every_run(path) if (run / "tensorboard").is_dir())
    records = [read_record(run) for run in found]
    if not records:
        raise ConfigError(f"{paths[0]}: holds no run that has logged to TensorBoard; name folders of runs or studies")
    for record, name in zip(records, short_names(records), strict=True):
        link = folder / name / f"seed={record.seed}"
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            raise ConfigError(f"{record.path}: has the name of {link.resolve().parent}; open them one after the other")
        link.symlink_to((record.path / "tensorboard").absolute())
