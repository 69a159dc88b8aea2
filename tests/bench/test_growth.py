"""Growth is measured where only one size grows, and counted from what really grows."""

from pathlib import Path

import pandas as pd
import pytest

from llama_lab.bench.charts import growth_chart
from llama_lab.bench.growing_studies import Workshop
from llama_lab.bench.growth import (
    GRIDS,
    SIZES,
    TITLES,
    Base,
    counted,
    growth_table,
    in_turn,
    measure_counts,
    measure_size,
    relative,
    rows_at,
    training,
)
from llama_lab.study.report.analysis import analyse
from llama_lab.study.study import Study
from tests.conftest import Command

TINY = GRIDS["tiny"]


def flops(base: Base) -> float:
    return counted(training(base).side.model)["flops"]


@pytest.mark.parametrize("size", SIZES)
def test_a_trained_token_is_measured_at_every_size_beside_its_flops(size: str) -> None:
    rows = measure_size(size, TINY, rounds=2)
    first, second = rows.itertuples()
    base = getattr(TINY.base, size)
    assert (first.what, first.size, second.size) == (size, str(base), str(2 * base))
    assert (first.measured, first.counted) == (1, 1)
    assert second.measured == pytest.approx(second.median_s / first.median_s)
    assert 1 < second.counted < 4
    assert 0 < first.update_share < 1
    assert 0 < first.low_s <= first.median_s <= first.high_s


def test_a_step_has_as_many_tokens_at_every_context() -> None:
    for multiple in GRIDS["full"].multiples:
        base = Base(context=int(multiple * Base().context))
        spec = training(base).spec
        assert (spec.tokens, spec.shape.max_seq_len) == (Base().tokens, base.context)


def test_shares_of_the_flops_are_those_of_the_head_and_of_the_scores() -> None:
    base = Base(depth=2, width=64, vocabulary=512, context=64, tokens=128)
    found = counted(training(base).side.model)
    assert found["flops"] * found["head_share"] == pytest.approx(3 * 2 * 64 * 512)
    # Scores and their use: two products of a query with each of (T + 1) / 2 keys on average, in each layer.
    assert found["flops"] * found["score_share"] == pytest.approx(3 * 2 * (2 * 2 * 64) * (64 + 1) / 2)


def test_the_counted_part_that_a_size_does_not_touch_stays() -> None:
    small = Base(depth=1, width=32, vocabulary=64, context=16, tokens=64)
    large = Base(depth=1, width=32, vocabulary=128, context=16, tokens=64)
    assert flops(large) - flops(small) == 3 * 2 * 32 * 64


def test_points_are_measured_in_alternating_order_after_a_warm_up() -> None:
    order: list[int] = []

    def point(value: int) -> float:
        order.append(value)
        return float(len(order))

    seconds = in_turn({1: lambda: point(1), 2: lambda: point(2)}, rounds=2)
    assert order == [1, 2, 1, 2, 2, 1]
    assert seconds == {1: [3.0, 6.0], 2: [4.0, 5.0]}


def test_growth_is_relative_to_the_base() -> None:
    rows = relative(rows_at("depth", "train", {1: [1.0], 2: [4.0, 2.0]}), pd.Series([10.0, 40.0]), [False, True])
    assert list(rows.measured) == [1 / 3, 1.0]
    assert list(rows.counted) == [0.25, 1.0]
    table = growth_table(rows)
    assert list(table.columns[5].cells) == ["1.33", "1.00"]


def test_a_study_has_as_many_arms_as_asked_for_and_half_of_them_are_matched(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    plan = workshop.plan(4)
    assert len(plan.arms) == 4
    assert [arm.arm.reference == arm.arm.name for arm in plan.arms] == [True, False] * 2
    assert not plan.folder.exists()


def test_a_report_is_about_all_made_up_runs(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    report = workshop.report_of(8)
    (folder,) = (tmp_path / "runs").iterdir()
    result = analyse(Study.load(folder), folder)
    assert [len(arm.records) for arm in result.arms] == [4, 4]
    assert all(record.status == "done" for arm in result.arms for record in arm.records)
    assert all(arm.to_baseline.seeds == (1, 2, 3, 4) for arm in result.arms if arm.to_baseline)
    report()
    assert "postnorm-2-warmup=0" in (folder / "report.html").read_text()


def test_counts_are_relative_to_the_smallest() -> None:
    rows = measure_counts("arms", {2: lambda: None, 8: lambda: None}, rounds=1)
    assert list(rows.counted) == [1.0, 4.0]


def test_the_chart_has_a_panel_for_each_size() -> None:
    rows = relative(rows_at("depth", "train", {1: [1.0], 2: [4.0, 2.0]}), pd.Series([10.0, 40.0]), [True, False])
    figure = growth_chart([rows, rows], TITLES)
    assert [axes.get_title() for axes in figure.axes] == [TITLES["depth"]] * 2
    assert figure.axes[0].lines[-1].get_ydata()[1] == 4


def test_the_full_grid_has_four_points_of_each() -> None:
    full = GRIDS["full"]
    assert {len(points) for points in (full.multiples, full.arms, full.runs)} == {4}
    assert 1 in full.multiples


@pytest.mark.slow
def test_growth_prints_a_table_of_each_and_writes_rows_and_a_picture(bench: Command, tmp_path: Path) -> None:
    ran = bench("growth", "--preset", "tiny", "--rounds", "1")
    assert (ran.code, ran.err) == (0, "")
    assert all(title in ran.out for title in TITLES.values())
    assert "…" not in ran.out
    rows = pd.read_csv(tmp_path / "bench" / "growth.csv")
    assert list(rows.what) == [what for what in (*SIZES, "arms", "runs") for _ in range(2)]
    assert (tmp_path / "bench" / "growth.png").read_bytes().startswith(b"\x89PNG")
