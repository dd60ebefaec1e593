import re
from html.parser import HTMLParser

import pytest

from twinpool.reports.chart import Chart, Mark, Series
from twinpool.reports.html import Section, html_page
from twinpool.reports.svg import chart_figure
from twinpool.tables import Table

CHART = Chart(
    "Requests by memory",
    "memory (GiB)",
    "requests",
    series=(
        Series("states", (40, 80, 141), (1234, 5678, 9012.5), unit="slots"),
        Series("kv", (40, 80, 141), (10, None, 30), step=True),
    ),
    marks=(Mark(80, "one H100"), Mark(141, "one H200")),
)
SECTIONS = (
    Section("Sweep", ("The state pool binds.",), (Table(("device", "requests"), [("H100", "5,678")], {1}),), (CHART,)),
)
EVIL = "<script>alert('&\"')</script>"


class Page(HTMLParser):
    """Collects tags, attributes and text; fails at an end tag that closes nothing or the wrong element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = html_page("Plan", SECTIONS)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {name for name, _ in page.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")}
    assert not re.search(r"https?:|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_page_has_every_number_and_text() -> None:
    text = Page(html_page("Plan", SECTIONS)).text
    for part in (
        "Plan", "Sweep", "The state pool binds.", "H100", "5,678", "states: 1,234 slots\nmemory (GiB): 40",
        "states: 9,012.5 slots\nmemory (GiB): 141", "kv: 30\n", "one H100: 80", "states (slots)", "10K",
    ):  # fmt: skip
        assert part in text


def test_every_text_is_escaped() -> None:
    chart = Chart(EVIL, EVIL, EVIL, series=(Series(EVIL, (1,), (2,), unit=EVIL),), marks=(Mark(1, EVIL),))
    page = Page(html_page(EVIL, [Section(EVIL, [EVIL], [Table((EVIL,), [(EVIL,)])], [chart])]))
    assert "script" not in page.tags
    assert page.text.count(EVIL) == 16
    assert ("aria-label", EVIL) in page.attributes


def test_same_input_same_bytes() -> None:
    assert html_page("Plan", SECTIONS) == html_page("Plan", SECTIONS)


def test_light_dark_and_paper() -> None:
    text = html_page("Plan", ())
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for index in range(8):
        assert text.count(f"--c{index}: #") == 2


def test_a_gap_cuts_the_line_and_has_no_dot() -> None:
    figure = chart_figure(CHART)
    lines = re.findall(r'<polyline points="([^"]*)"', figure)
    assert [len(line.split()) for line in lines] == [3, 2, 1]
    assert figure.count("<circle") == 5


def test_points_are_where_the_axes_say() -> None:
    chart = Chart("t", "x", "y", series=(Series("a", (0, 5, 10), (0, 5, 10)),))
    assert 'points="64,292 400,161 736,30"' in chart_figure(chart)


def test_dots_that_would_hide_their_line_wait_for_the_pointer() -> None:
    for count, dense in ((100, 0), (101, 101)):
        numbers = tuple(float(n) for n in range(count))
        figure = chart_figure(Chart("t", "x", "y", series=(Series("a", numbers, numbers),)))
        assert (figure.count("<circle"), figure.count('class="dot dense c0"')) == (count, dense)


def test_series_differ_without_colour() -> None:
    many = tuple(Series(str(n), (0, 1), (0, n)) for n in range(4))
    dashes = re.findall(r'stroke-dasharray="([^"]*)"/?>', chart_figure(Chart("t", "x", "y", series=many)))
    assert len(set(dashes)) == 4


@pytest.mark.parametrize("marks", [(), (Mark(3, "only"),)])
def test_a_chart_without_points_has_axes(marks: tuple[Mark, ...]) -> None:
    figure = chart_figure(Chart("empty", "x", "y", series=(Series("a", (), ()),), marks=marks))
    assert "<polyline" not in figure
    assert figure.count('class="grid"') == 5
