import math

import pytest

from twinpool.reports.chart import Chart, Mark, Series


def test_points_leave_out_gaps_and_lines_are_cut_there() -> None:
    series = Series("hits", (1, 2, 3, 4), (5, None, 6, 7))
    assert series.points == ((1, 5), (3, 6), (4, 7))
    assert series.lines == (((1, 5),), ((3, 6), (4, 7)))


def test_a_step_holds_to_the_next_x_and_up_to_a_gap() -> None:
    series = Series("cap", (1, 2, 3, 4), (5, 6, None, 7), step=True)
    assert series.lines == (((1, 5), (2, 5), (2, 6), (3, 6)), ((4, 7),))


def test_a_label_has_its_unit() -> None:
    assert Series("hits", (), (), unit="%").label == "hits (%)"
    assert Series("hits", (), ()).label == "hits"


def test_pairs_must_be_complete_and_finite() -> None:
    with pytest.raises(ValueError, match="series 'hits' has 2 xs and 1 ys"):
        Series("hits", (1, 2), (1,))
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="a missing y is None"):
            Series("hits", (1,), (number,))


def test_an_axis_takes_what_it_can_show() -> None:
    with pytest.raises(ValueError, match="x = 0: a logarithmic axis needs more than 0"):
        Chart("t", "x", "y", series=(Series("hits", (0,), (1,)),), log_x=True)
    with pytest.raises(ValueError, match="a mark that is not finite"):
        Chart("t", "x", "y", series=(), marks=(Mark(math.inf, "never"),))


def test_marks_count_as_xs() -> None:
    chart = Chart("t", "x", "y", series=(Series("a", (1, 2), (3, None)),), marks=(Mark(9, "now"),))
    assert chart.xs == (1, 2, 9)
    assert chart.ys == (3,)
