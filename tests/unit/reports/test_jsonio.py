import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

from twinpool.reports.jsonio import json_text


@dataclass(frozen=True)
class Inner:
    name: str
    size_bytes: int


@dataclass(frozen=True)
class Outer:
    zeta: tuple[Inner, ...]
    alpha: object


def test_fields_keep_their_order() -> None:
    assert json_text(Outer((Inner("é", 7),), {"b": None, "a": True})) == (
        '{\n  "zeta": [\n    {\n      "name": "é",\n      "size_bytes": 7\n    }\n  ],\n'
        '  "alpha": {\n    "b": null,\n    "a": true\n  }\n}'
    )


def test_numpy_numbers_are_numbers() -> None:
    value = Outer((), [np.int64(3), np.float32(0.5), np.bool_(True), np.arange(4).reshape(2, 2)])
    assert json.loads(json_text(value))["alpha"] == [3, 0.5, True, [[0, 1], [2, 3]]]


@pytest.mark.parametrize("number", [math.nan, math.inf, np.float64("nan"), np.array([1.0, -np.inf])])
def test_what_json_cannot_say_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"x": number})


@pytest.mark.parametrize("value", [{1, 2}, b"x", Outer, object()])
def test_what_has_no_one_reading_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        json_text([value])


def test_keys_are_strings() -> None:
    with pytest.raises(TypeError, match="a key of a JSON object is a string, not 3"):
        json_text({3: "x"})
