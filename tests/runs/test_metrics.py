"""metrics.csv: every row is on disk at once, and a kill at any byte costs at most the row being written."""

from pathlib import Path

from llama_lab.runs.metrics import NO_ROWS, described, read_cells, read_metrics
from llama_lab.runs.stored import COLUMNS
from llama_lab.training.loggers import MetricsCSV
from tests.refusals import refusing

ROWS = [
    {"step": 10, "tokens": 2560, "seconds": 0.1, "train/loss": 5.25, "perf/peak_memory_bytes": 460435456},
    {"step": 19, "tokens": 4864, "seconds": 0.2, "val/loss": 4.081794818544569, "val/bits_per_byte": 1 / 3},
    {"step": 20, "tokens": 5120, "seconds": 0.3, "train/loss": 1e-300, "perf/peak_memory_bytes": 460566528},
]


def written(folder: Path) -> MetricsCSV:
    """A table that holds ROWS."""
    table = MetricsCSV(folder / "metrics.csv")
    for row in ROWS:
        table.log_metrics({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))
    return table


def test_rows_come_back_as_they_were_logged_to_the_last_bit(tmp_path: Path) -> None:
    assert read_metrics(written(tmp_path).path) == ROWS


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsCSV(path).forget_after(NO_ROWS)
    assert not path.exists(), "there is nothing to forget before the first row"
    for number, row in enumerate(ROWS):
        MetricsCSV(path).log_metrics({"tokens": row["tokens"]}, step=int(row["step"]))
        assert len(path.read_text().splitlines()) == number + 2
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_resumed_run_forgets_the_rows_after_its_step_and_keeps_the_others_exactly(tmp_path: Path) -> None:
    table = written(tmp_path)
    table.forget_after(described(read_cells(table.path)[:2]))
    assert read_metrics(table.path) == ROWS[:2]
    table.log_metrics({"tokens": 5120}, step=20)
    assert read_metrics(table.path) == [*ROWS[:2], {"step": 20, "tokens": 5120}]
    table.forget_after(NO_ROWS)
    assert read_metrics(table.path) == []


def test_a_row_cut_short_by_a_kill_is_left_out_whichever_its_last_byte(tmp_path: Path) -> None:
    table = written(tmp_path)
    content = table.path.read_bytes()
    for cut in range(content.index(b"\n") + 1, len(content)):
        table.path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n") - 1
        assert read_metrics(table.path) in (ROWS[:whole], ROWS[: whole + 1]), content[:cut]
        table.forget_after(described(read_cells(table.path)))  # as a resumed run does before it logs
        table.log_metrics({"tokens": 7680}, step=30)
        assert read_metrics(table.path)[whole:][-1] == {"step": 30, "tokens": 7680}


def test_a_metric_of_the_user_s_gets_its_column_with_its_first_row_and_harms_no_other(tmp_path: Path) -> None:
    table = written(tmp_path)
    for step in (21, 22):
        table.log_metrics({"tokens": 1, "mine": step / 7}, step=step)
    assert read_metrics(table.path) == [*ROWS, *({"step": step, "tokens": 1, "mine": step / 7} for step in (21, 22))]
    assert table.rows == described(read_cells(table.path))


def test_a_resumed_run_keeps_exactly_the_rows_before_its_checkpoint_whatever_columns_it_has(tmp_path: Path) -> None:
    table = written(tmp_path)
    known = table.rows
    assert known == described(read_cells(table.path))
    assert known["count"] == 3
    table.log_metrics({"tokens": 5376}, step=20)
    wider = MetricsCSV(table.path, layers=2)
    assert [row["tokens"] for row in wider.forget_after(known)] == [row["tokens"] for row in ROWS]
    assert wider.rows == known == described(read_cells(table.path))
    assert read_metrics(table.path) == ROWS


def test_rows_other_than_those_before_the_checkpoint_are_refused(tmp_path: Path) -> None:
    table = written(tmp_path)
    table.path.write_text(table.path.read_text().replace("5.25", "5.35"))
    with refusing(f"{table.path}: is damaged"):
        MetricsCSV(table.path).forget_after(table.rows)
