"""The reader of TOML, which Python has from 3.11 on."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml  # type: ignore[import-not-found]

__all__ = ["toml"]
