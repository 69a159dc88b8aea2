"""Reads the files that W&B leaves when it is offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def records(file: Path) -> Iterator[Record]:
    """The records of an offline run: LevelDB's log format, after a header of seven bytes."""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    position, whole = 7, b""
    while position < len(data):
        if 32768 - position % 32768 < 7:  # the end of a block that no header fits in
            position += 32768 - position % 32768
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


class OfflineRun:
    """What the only offline run in a run's folder holds."""

    def __init__(self, folder: Path) -> None:
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.step_metrics: dict[str, str] = {}
        self.artifacts: dict[str, set[str]] = {}  # the files of each, by its type and name
        self.finished = False
        for record in records(file):
            if record.HasField("run"):
                self.run = record.run
                self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                items = record.history.item
                self.history.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
            elif record.HasField("summary"):
                self.summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update}
            elif record.HasField("metric"):
                self.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif record.HasField("artifact"):
                artifact = record.artifact
                files = {entry.path for entry in artifact.manifest.contents}
                self.artifacts[f"{artifact.type}/{artifact.name}"] = files
            self.finished |= record.HasField("exit")
