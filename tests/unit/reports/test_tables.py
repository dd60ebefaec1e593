import pytest

from twinpool.tables import Table, table_text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = table_text(
        ("device", "requests", "note"), [("A", "7", ""), ("B 80 GiB", "1,024", "state pool binds")], right={1}
    )
    assert text == (
        "device    requests  note\n"
        "A                7\n"
        "B 80 GiB     1,024  state pool binds"
    )  # fmt: skip


def test_a_table_without_rows_is_its_head() -> None:
    assert table_text(("a", "b"), []) == "a  b"


def test_an_uneven_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row has 1 cells under a head of 2: \['x'\]"):
        Table(("a", "b"), [("x",)])
