"""`twinpool serve`: options, then the server until it is stopped."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.config.flags import parse_serve


def run(argv: Sequence[str]) -> int:
    """Serve until stopped and return the exit code. Raises ConfigError before anything slow is imported."""
    options = parse_serve(argv)
    from twinpool.server.app import serve  # torch and transformers take seconds; --help and a bad flag need neither

    serve(options)
    return 0
