import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.reports.chart import Chart, Mark, Series
from twinpool.reports.terminal import chart_text

SMALL = Chart("Slots", "memory (GiB)", "requests", series=(Series("states", (0, 10, 20), (0, 1000, 2000)),))


def test_a_small_chart_character_by_character() -> None:
    assert chart_text(SMALL, width=24, height=4).splitlines() == [
        "Slots",
        "requests",
        "2K ┤               ⢀⣀⠤⠒o",
        "   │           ⣀⠤⠒⠊⠁",
        "   │     ⣀⡠⠤⠒⠊o",
        " 0 ┤o⠤⠔⠒⠉",
        "   └┬─────────┬────────┬",
        "    0        10       20",
        "            memory (GiB)",
        "o  states: 0 to 2K",
    ]


def test_each_series_has_a_letter_and_each_mark_a_capital() -> None:
    chart = Chart(
        "t", "x", "y",
        series=(Series("kv", (1, 100), (1, 9), unit="tokens"), Series("slots", (1, 100), (9, 1_200)), Series("off", (), ())),
        marks=(Mark(10, "now"), Mark(50, "next")), log_x=True,
    )  # fmt: skip
    lines = chart_text(chart).splitlines()
    assert lines[-5:] == [
        "o  kv (tokens): 1 to 9",
        "x  slots: 9 to 1.2K",
        "+  off: no values",
        "A  now: 10",
        "B  next: 50",
    ]
    heads = lines[2]
    assert heads.split() == ["A", "B"]
    assert all(line[heads.index("A")] in "┊ox" or ord(line[heads.index("A")]) > 0x2800 for line in lines[3:21])


def test_dense_points_leave_room_for_the_line() -> None:
    xs = tuple(range(1000))
    text = chart_text(Chart("", "", "", series=(Series("a", xs, xs),)), width=42, height=6)
    plot = text[: text.index("└")]
    assert plot.count("o") == 6


def test_a_step_is_drawn_as_a_corner() -> None:
    step = Series("cap", (0, 1, 2), (0, 0, 4), step=True)
    assert chart_text(Chart("", "", "", series=(step,)), width=23, height=3).splitlines()[:3] == [
        "5 ┤                   o",
        "  │                   ⢸",
        "0 ┤o⣀⣀⣀⣀⣀⣀⣀⣀⣀o⣀⣀⣀⣀⣀⣀⣀⣀⣸",
    ]


def test_an_empty_chart_has_axes() -> None:
    text = chart_text(Chart("nothing", "x", "y", series=()), height=3)
    assert text.startswith("nothing\ny\n1 ┤\n  │\n0 ┤\n")


def test_the_least_height() -> None:
    with pytest.raises(ValueError, match="1 rows was asked for: the least is 2"):
        chart_text(SMALL, height=1)


points = st.tuples(st.floats(0.001, 1e9), st.one_of(st.none(), st.floats(-1e9, 1e9, allow_subnormal=False)))


@given(st.lists(points, max_size=30), st.integers(36, 120), st.integers(2, 30), st.booleans())
def test_the_plot_keeps_to_its_size(
    pairs: list[tuple[float, float | None]], width: int, height: int, log_x: bool
) -> None:
    series = Series("a", tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
    lines = chart_text(Chart("t", "x", "y", series=(series,), log_x=log_x), width=width, height=height).splitlines()
    assert sum("┤" in line or "│" in line for line in lines) == height
    assert max(len(line) for line in lines[:-1]) <= width
