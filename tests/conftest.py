"""A tiny corpus, an environment without keys, and ways to run train.py: as a process, and inside this one."""

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hypothesis import settings

from llama_lab.cli import eval_command, train_command
from llama_lab.config import components, schema
from llama_lab.config.grammar import override_key
from llama_lab.devices.hardware import Hardware
from llama_lab.launching import launch
from llama_lab.training.compiling import missing_part
from tests.browser import CHROMIUM, FLAGS
from tests.faster import work_faster
from tests.preloaded import PreloadedPython

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TRAIN = Path(__file__).parents[1] / "train.py"
MISSING = missing_part(Hardware("cpu", 1, 1, "32-true", "cpu"))
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=f"compiling needs {MISSING}")
STARTERS = {"preloaded", "browser"}  # fixtures that start processes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # of a tiny model, threads would spend most of their time waiting for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too; Lightning would set it for DDP
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


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what imports have made: composing a config is a quarter faster."""
    gc.freeze()


@dataclass(frozen=True)
class Ran:
    """What a command left behind: its exit code, what it printed, and the folder it ran in."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def run(self) -> Path:
        """The folder of its only run."""
        (status,) = (self.cwd / "runs").rglob("status.json")
        return status.parent


def last_of_each(overrides: Iterable[str]) -> list[str]:
    """The overrides, each key once and with its last value: so a test may change what `tiny` sets."""
    return list({override_key(o) if "=" in o else o: o for o in overrides}.values())


def unstamped(file: Path) -> str:
    """The text of a stamped YAML file without its checksum, so that it may be changed."""
    first, _, text = file.read_text().partition("\n")
    assert first.startswith("# checksum: ")
    return text


def without_keys(environment: dict[str, str], home: Path) -> dict[str, str]:
    """An environment that no W&B setting, key or Hydra setting of this machine reaches."""
    kept = {k: v for k, v in environment.items() if not k.startswith(("WANDB_", "HYDRA_", "LLAMA_LAB_", "COLUMNS"))}
    ours = {"NETRC": str(home / "no_netrc"), "LLAMA_LAB_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    return {**kept, **ours}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session keeps its corpus and its token cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def corpus(home: Path) -> Path:
    """66 kB of text that looks like code; some characters have more than one byte."""
    draw = random.Random(0)
    lines = (f"def f{i}(x): return {draw.randrange(10**3)} * x  # {draw.choice('aé€')}\n\n" for i in range(1500))
    file = home / "corpus.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def tiny(corpus: Path, home: Path) -> list[str]:
    """The overrides of a run of 78 steps that takes a second or two."""
    return [
        "size=pico",
        "data=text",
        f"data.files=[{corpus}]",
        "data.document_chars=500",
        f"data.cache_dir={home / 'cache'}",
        "tokenizer=byte",
        "train.batch_size=8",
        "train.tokens=20000",
        "train.sample_tokens=10",
        "logger=none",
    ]


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    """The environment of the processes that tests start."""
    return without_keys(dict(os.environ), home)


@pytest.fixture(scope="session")
def preloaded(environment: dict[str, str], home: Path) -> Iterator[PreloadedPython]:
    """Starts scripts as processes that need not import PyTorch."""
    with PreloadedPython(environment, home) as python:
        yield python


RunTrain = Callable[..., Ran]


@pytest.fixture(scope="session")
def run_train(
    preloaded: PreloadedPython, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> RunTrain:
    """Run `python train.py *overrides` as a process, in `cwd` or a fresh folder, with standard input closed.

    It and what it starts are forks of the preloaded Python, unless it is to import everything itself (`fresh`).
    """

    def run(
        *overrides: str, cwd: Path | None = None, script: Path = TRAIN, fresh: bool = False, **variables: str
    ) -> Ran:
        cwd = cwd or tmp_path_factory.mktemp("run")
        done = subprocess.run(
            [sys.executable if fresh else preloaded.executable, str(script), *last_of_each(overrides)],
            cwd=cwd,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Ran(done.returncode, done.stdout, done.stderr, cwd)

    return run


Command = Callable[..., Ran]


@pytest.fixture(scope="session", autouse=True)
def defaults_composed_once() -> Iterator[None]:
    """Commands inside this process share the defaults of packaged options: composing takes a quarter of a second."""
    known: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    compose = schema.composed_settings

    def look_up(config: str, overrides: tuple[str, ...], loader: ConfigLoader) -> dict[str, Any]:
        if any(element.provider == "command-line" for element in loader.get_search_path().get_path()):
            return compose(config, overrides, loader)  # with the user's own options
        if (config, overrides) not in known:
            known[config, overrides] = compose(config, overrides, loader)
        return known[config, overrides]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schema, "composed_settings", look_up)
        yield


@pytest.fixture(scope="session", autouse=True)
def faster() -> Iterator[None]:
    """Commands inside this process compose and build as fast as in forks of the preloaded Python."""
    with pytest.MonkeyPatch.context() as patched:
        work_faster(partial(patched.setattr, raising=False))
        yield


@pytest.fixture(autouse=True)
def forget_components() -> None:
    """What one test has built is no user's component in the next."""
    components._components.clear()


def enter(folder: Path, environment: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """Have commands inside this process start in a folder, with no key of this machine."""
    patch.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        patch.delenv(name)
    for name in ("NETRC", "LLAMA_LAB_CACHE"):
        patch.setenv(name, environment[name])


def exit_code(function: Callable[[], None], argv: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a command of ours inside this process; its exit code."""
    for name in ("HYDRA_FULL_ERROR", "LLAMA_LAB_TRACEBACK"):  # the command sets them
        patch.setenv(name, "0")
    patch.setattr(sys, "argv", argv)
    GlobalHydra.instance().clear()
    try:
        function()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


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
def bad_files(tmp_path: Path) -> Path:
    """The folder of a command, with files in it that are no text to train on."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "latin.txt").write_bytes("façade ".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "lines.txt").write_text("".join(f"line number {i}\n\n" for i in range(1000)))
    return tmp_path


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
            values.extend(job.return_value for batch in batches for job in batch)
            return batches

        monkeypatch.setattr(sweeper, "sweep", watched)
        return sweeper

    monkeypatch.setattr(Plugins, "instantiate_sweeper", instantiate_watched)
    return values


@pytest.fixture(scope="session")
def finished(run_train: RunTrain, tiny: list[str]) -> Ran:
    """A whole run as a newcomer would start it: with all loggers, without a W&B key, from a process without input."""
    return run_train(*tiny, "logger=all", "train.checkpoint_every=7", "train.micro_batch_size=4", fresh=True)


@pytest.fixture(scope="session")
def whole(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of `tests.training.stopping`, which nobody stops."""
    from tests.training.stopping import RUN, trained

    return trained(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('whole')}")


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """The chromium that is installed; one for the session, since Playwright starts once in a process."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
