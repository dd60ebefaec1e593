import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.reports.axis import Axis, full_number, short_number, x_axis, y_axis
from twinpool.reports.chart import Chart, Mark, Series


def chart(xs: tuple[float, ...] = (), ys: tuple[float, ...] = (), log_x: bool = False) -> Chart:
    return Chart("t", "x", "y", series=(Series("a", xs, ys or (0,) * len(xs)),), log_x=log_x)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (0.05, "0.05"), (-12.345, "-12.3"), (999, "999"), (999.9, "1K"), (1234, "1.23K"),
        (-3_400_000, "-3.4M"), (999_999, "1M"), (80e9, "80G"), (1.5e12, "1.5T"), (1e15, "1000T"),
    ],
)  # fmt: skip
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(262_144, "262,144"), (5.0, "5"), (0.9251234, "0.925123"), (1_234_567.5, "1,234,568"), (-1.25, "-1.25")],
)
def test_full_numbers(value: float, text: str) -> None:
    assert full_number(value) == text


def test_a_y_axis_starts_at_zero_and_ends_at_a_round_number() -> None:
    assert y_axis(chart((1, 2), (900, 1730)), intervals=5) == Axis(0, 2000, (0, 500, 1000, 1500, 2000))
    assert y_axis(chart((1, 2), (-3, 4)), intervals=4) == Axis(-4, 4, (-4, -2, 0, 2, 4))
    assert y_axis(chart((1,), (0,)), intervals=2) == Axis(0, 1, (0, 0.5, 1))


def test_an_x_axis_is_as_wide_as_its_values() -> None:
    assert x_axis(chart((3, 17)), intervals=5) == Axis(3, 17, (5, 10, 15))
    assert x_axis(chart((5,)), intervals=5) == Axis(2.5, 7.5, (3, 4, 5, 6, 7))
    assert x_axis(chart(), intervals=2) == Axis(0, 1, (0, 0.5, 1))


def test_tenths_are_tenths() -> None:
    assert x_axis(chart((0, 0.5)), intervals=5).ticks == (0, 0.1, 0.2, 0.3, 0.4, 0.5)


def test_a_logarithmic_axis_thins_its_numbers() -> None:
    assert x_axis(chart((1, 50), log_x=True), intervals=8).ticks == (1, 2, 5, 10, 20, 50)
    assert x_axis(chart((2, 30_000), log_x=True), intervals=6).ticks == (10, 100, 1000, 10_000)
    assert x_axis(chart((1, 1e9), log_x=True), intervals=4).ticks == (1, 100, 1e4, 1e6, 1e8)
    assert x_axis(chart((11, 15), log_x=True), intervals=4).ticks == (11, 12, 13, 14, 15)
    assert x_axis(chart(log_x=True), intervals=4).ticks == (1, 2, 5, 10)


def test_a_logarithmic_axis_spaces_ratios_evenly() -> None:
    axis = x_axis(chart((1, 10_000), log_x=True), intervals=4)
    assert [round(axis.share(x), 9) for x in (1, 10, 100, 1000, 10_000)] == [0, 0.25, 0.5, 0.75, 1]


def test_labels_have_the_digits_that_tell_them_apart() -> None:
    assert Axis(0, 1, (0, 500, 1000)).labels == ("0", "500", "1K")
    assert Axis(0, 1, (100_000, 100_005, 100_010)).labels == ("100K", "100.005K", "100.01K")


numbers = st.floats(-1e12, 1e12).map(lambda x: round(x, 3))


@given(st.lists(numbers, min_size=1, max_size=9), st.integers(1, 10))
def test_linear_axes_hold_their_values_and_ticks(values: list[float], intervals: int) -> None:
    one = chart(tuple(values), tuple(values))
    for axis in (x_axis(one, intervals=intervals), y_axis(one, intervals=intervals)):
        assert axis.low < axis.high
        assert all(0 <= axis.share(value) <= 1 for value in values)
        assert all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick in axis.ticks)
        assert len(axis.ticks) <= intervals + 3
        assert list(axis.ticks) == sorted(set(axis.ticks))


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=9), st.integers(1, 10))
def test_logarithmic_axes_hold_their_values_and_ticks(values: list[float], intervals: int) -> None:
    axis = x_axis(chart(tuple(values), log_x=True), intervals=intervals)
    assert axis.low < axis.high
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in (*values, *axis.ticks))
    assert len(axis.ticks) <= intervals + 1


def test_a_mark_widens_the_axis() -> None:
    assert x_axis(Chart("t", "x", "y", series=(), marks=(Mark(2, "a"), Mark(8, "b"))), intervals=3).ticks == (
        2,
        4,
        6,
        8,
    )
