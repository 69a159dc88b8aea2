"""Which tests a session takes, in sessions of pytest inside this one."""

import time

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("number", range(40))
def test_a_product(number): pass

def test_another(): pass
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    matrix: all products")
    return pytester


@pytest.mark.slow
def test_each_test_of_the_matrix_is_in_one_of_eight_shares(session: pytest.Pytester) -> None:
    taken = [session.runpytest("-p", "tests.selection", f"--share={share}").parseoutcomes() for share in range(8)]
    assert all(outcome["passed"] >= 1 for outcome in taken)
    assert sum(outcome["passed"] for outcome in taken) == 40 + 8
    assert session.runpytest("-p", "tests.selection").parseoutcomes()["passed"] == 41


def test_no_test_begins_after_the_time_that_is_given(session: pytest.Pytester) -> None:
    late = session.runpytest("-p", "tests.selection", f"--until={time.time() - 1}", "-rs")
    assert late.parseoutcomes() == {"skipped": 41}
    late.stdout.fnmatch_lines(["*40*left for lack of time (matrix)*", "*1*left for lack of time (quick)*"])
    assert session.runpytest("-p", "tests.selection", f"--until={time.time() + 100}").ret == 0
