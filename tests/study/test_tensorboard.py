"""`llama-lab-tensorboard`, and what a browser shows of it."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser

from llama_lab.cli import tensorboard_command
from llama_lab.runs.tensorboard import link_runs
from tests.browser import in_browser
from tests.conftest import Ran
from tests.refusals import check_refused, refusing
from tests.study.planning import conducted

OPEN = "from llama_lab.cli import tensorboard_command; tensorboard_command()"


@pytest.fixture(scope="module")
def swept(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with long folder names."""
    sweep = ("--multirun", *tiny, "train.tokens=2560", "logger=tensorboard", "norm=layernorm,rmsnorm")
    ran = conducted(tmp_path_factory.mktemp("swept"), environment, *sweep)
    assert ran.code == 0, ran.err
    return ran.cwd / "runs"


@pytest.fixture(scope="module")
def address(swept: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address that the command prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", OPEN, str(swept), "--port", port, "--reload_interval", "1"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = next(filter(None, (re.search(rb"http://\S+", line) for line in server.stdout)))
    yield printed[0].decode()
    server.send_signal(signal.SIGTERM)
    server.stdout.read()
    server.wait(30)


def runs_at(address: str) -> list[str]:
    """The names of the runs, as soon as TensorBoard serves some."""
    for _ in range(300):
        try:
            with urlopen(urljoin(address, "data/runs")) as answer:
                if found := json.load(answer):
                    return sorted(found)
        except URLError:
            pass
        time.sleep(0.1)
    raise AssertionError("TensorBoard serves no runs")


@pytest.mark.process
@pytest.mark.slow
def test_tensorboard_shows_short_names(address: str) -> None:
    assert runs_at(address) == ["norm=layernorm/seed=1", "norm=rmsnorm/seed=1"]


@pytest.mark.process
@pytest.mark.slow
@in_browser
def test_the_page_of_hparams_has_each_run_s_choices_and_results(address: str, browser: Browser, swept: Path) -> None:
    runs_at(address)
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.goto(address)
    for tag in ("train/loss", "val/loss"):
        page.get_by_text(tag, exact=True).first.wait_for()
    page.close()
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.goto(urljoin(address, "#hparams"))
    losses = [json.loads(file.read_text())["val/loss"] for file in swept.rglob("summary.json")]
    for shown in ("arm", "norm", "optim.lr", "final/val/loss", "norm=rmsnorm", *(f"{loss:#.5g}" for loss in losses)):
        page.get_by_text(shown, exact=True).first.wait_for()
    assert not page.get_by_text("data", exact=True).count()
    page.close()


@pytest.mark.slow
def test_links_follow_the_names_and_lead_to_the_events(swept: Path, tmp_path: Path) -> None:
    link_runs([swept], tmp_path)
    links = sorted(tmp_path.glob("*/*"))
    assert [str(link.relative_to(tmp_path)) for link in links] == ["norm=layernorm/seed=1", "norm=rmsnorm/seed=1"]
    assert all(any("tfevents" in file.name for file in link.iterdir()) for link in links)


def test_a_folder_without_runs_is_reported_in_one_line(in_process: Callable[..., Ran]) -> None:
    check_refused(in_process(tensorboard_command, "llama-lab-tensorboard", "nowhere"), "nowhere: ")


@pytest.mark.slow
def test_two_runs_of_one_name_are_reported(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept, tmp_path / "copy")
    with refusing(str(tmp_path / "copy")):
        link_runs([swept, tmp_path / "copy"], tmp_path / "links")
