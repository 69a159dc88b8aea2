"""An environment without keys, and ways to run train.py: as a process, and inside this one."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from llama_lab.cli import eval_command, train_command
from llama_lab.config import components
from llama_lab.devices.hardware import Hardware
from llama_lab.launching import launch
from llama_lab.training.compiling import missing_part
from tests.commands import Ran, enter, exit_code, last_of_each, run_new, without_keys
from tests.processes import Started

pytest_plugins = ["tests.browser", "tests.corpus", "tests.selection"]

TRAIN = Path(__file__).parents[1] / "train.py"
MISSING = missing_part(Hardware("cpu", 1, 1, "32-true", "cpu"))
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=f"compiling needs {MISSING}")
STARTERS = {"start", "sweep", "browser"}  # fixtures that start processes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # of a tiny model, threads would spend most of their time waiting for each other
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too; Lightning would set it for DDP
settings.register_profile("llama-lab", deadline=None)  # a busy machine is no bug
settings.load_profile("llama-lab")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose fixtures start processes, and begin with the longest, so that no core waits for them at the end.

    Files stay together, for their fixtures.
    """
    for item in items:
        if isinstance(item, pytest.Function) and STARTERS & {*item.fixturenames}:
            item.add_marker("process")
    longest, long = ({item.path for item in items if item.get_closest_marker(marker)} for marker in ("timeout", "slow"))
    items.sort(key=lambda item: (item.path not in longest, item.path not in long))


def unstamped(file: Path) -> str:
    """The text of a stamped YAML file without its checksum, so that it may be changed."""
    first, _, text = file.read_text().partition("\n")
    assert first.startswith("# checksum: ")
    return text


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    """The environment of the processes that tests start."""
    return without_keys(dict(os.environ), home)


Start = Callable[..., Started]


@pytest.fixture(scope="session")
def start(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start `python *command` in the folder `cwd`, with more variables; what is still at work at the end is killed."""
    started: list[Started] = []

    def start(*command: str, cwd: Path, **variables: str) -> Started:
        kept = tmp_path_factory.mktemp("started")
        started.append(Started(command, cwd, {**environment, **variables}, kept))
        return started[-1]

    yield start
    for process in started:
        process.kill_session()


RunTrain = Callable[..., Ran]


@pytest.fixture(scope="session")
def run_train(start: Start, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> RunTrain:
    """Run `python train.py *overrides` as a process, in `cwd` or a fresh folder, with standard input closed.

    It is a fork, see `Started`, unless it is to import everything itself (`fresh`).
    """

    def run(
        *overrides: str, cwd: Path | None = None, script: Path = TRAIN, fresh: bool = False, **variables: str
    ) -> Ran:
        cwd, command = cwd or tmp_path_factory.mktemp("run"), [str(script), *last_of_each(overrides)]
        if fresh:
            return run_new(command, cwd, {**environment, **variables})
        process = start(*command, cwd=cwd, **variables)
        return Ran(process.wait(), process.out.read_text(), process.err.read_text(), cwd)

    return run


Command = Callable[..., Ran]


@pytest.fixture(autouse=True)
def forget_components() -> None:
    """What one test has built is no user's component in the next."""
    components._components.clear()


@pytest.fixture
def in_process(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run a command of ours, by its function and script, inside this process, in a fresh folder: it starts at once."""
    enter(tmp_path, environment, monkeypatch)
    monkeypatch.setattr(launch, "program", lambda: [sys.executable, str(TRAIN)])

    def run(function: Callable[[], None], script: str, *overrides: str) -> Ran:
        capsys.readouterr()
        code = exit_code(function, [script, *last_of_each(overrides)], monkeypatch)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err, tmp_path)

    return run


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs, as far as PyTorch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


@pytest.fixture
def command(in_process: Callable[..., Ran]) -> Command:
    """Run `python train.py *overrides` inside this process, the runs of a study too unless a launcher is named."""

    def run(*overrides: str) -> Ran:
        is_study = any(override.startswith("study=") for override in overrides)
        launcher = ["hydra/launcher=basic"] if is_study else []
        return in_process(train_command, "train.py", *launcher, *overrides)

    return run


@pytest.fixture
def evaluating(in_process: Callable[..., Ran]) -> Command:
    """Run `python eval.py *overrides` inside this process."""
    return partial(in_process, eval_command, "eval.py")


@pytest.fixture(scope="session")
def finished(run_train: RunTrain, tiny: list[str]) -> Ran:
    """A whole run as a newcomer would start it: with all loggers, without a W&B key, from a process without input."""
    return run_train(*tiny, "logger=all", "train.checkpoint_every=7", "train.micro_batch_size=4", fresh=True)


@pytest.fixture(scope="session")
def whole(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of `tests.training.stopping`, which nobody stops."""
    from tests.training.stopping import RUN, trained

    return trained(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('whole')}")
