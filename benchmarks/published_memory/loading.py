"""Loading of BERT. accelerate documents the memory on CUDA, and its estimate of 413.18 MB.

Source: https://github.com/huggingface/accelerate at commit 00e4d264,
``docs/source/usage_guides/model_size_estimator.md``. Its megabytes have 1024 * 1024 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.published_memory.rows import Row

TITLE = "Loading of BERT, by accelerate's documentation"

_PAGE = "https://github.com/huggingface/accelerate/blob/00e4d264/docs/source/usage_guides/model_size_estimator.md"

SOURCE = f"[accelerate]({_PAGE})"

IMPORTS = ("transformers",)
"""What takes long to import."""

VERSIONS: dict[str, str] = {}


def _loaded(checkout: Path) -> Callable[[], object]:
    import transformers

    config = transformers.BertConfig(vocab_size=28996)  # that of bert-base-cased
    return lambda: transformers.BertModel(config).cuda()


ROWS = [Row("bert-base-cased, loaded", "not named", round(413.68 * 2**20), 10**4, _loaded, (8, 0))]
