"""Plan, replay and serve hybrid language models from two memory pools.

    from twinpool import LLM, SamplingParams
    with LLM() as llm:
        print(llm.generate("It was a fine morning", SamplingParams(max_tokens=20))[0].text)

Importing the package is light; torch and transformers come with the first `LLM`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.config.options import ServeOptions
    from twinpool.engine.llm import LLM, Completion
    from twinpool.request import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "ServeOptions"]

_HOMES = {
    "LLM": "twinpool.engine.llm",
    "Completion": "twinpool.engine.llm",
    "SamplingParams": "twinpool.request",
    "ServeOptions": "twinpool.config.options",
}


def __getattr__(name: str) -> object:
    """Public names, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twinpool' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
