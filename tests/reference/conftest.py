"""All tests of kernels run on two threads, unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twinpool.models.native import set_threads


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)
