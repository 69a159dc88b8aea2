"""How training ends early: requests to stop, and other reasons."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Outcome = Literal["done", "diverged", "interrupted", "pruned"]


class EndedError(Exception):
    """Raised when training ends before its budget. outcome: the status. message: the reason, in one line."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome


class StopRequest:
    """Ctrl-C and SIGTERM as a flag that the training loop reads between steps; a second Ctrl-C stops at once.

    A second SIGTERM does not: schedulers send several, and a save may be in progress. prune_file: a search creates it
    to stop the run, on whatever machine that trains.
    """

    def __init__(self, prune_file: Path | None = None) -> None:
        self.requested = False
        self._prune_file = prune_file

    @property
    def pruned(self) -> bool:
        """Whether a search has asked the run to stop."""
        return self._prune_file is not None and self._prune_file.exists()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager: handle the signals, then restore the previous handlers."""
        old = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Catch the signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
