"""Llama 3.1 8B by torchtitan with FSDP2 on 8 and 128 H100s.

Source: https://github.com/pytorch/torchtitan at commit 9dec370a, whose figures are in
``benchmarks/llama3_h100_202412_torchtitan.md``: the most memory that the allocator held. The rows
are those that neither compile nor use Float8. The model, its parallelism, the optimizer, and the
steps are those of ``train.py``, without the tokenizer and the texts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_memory.rows import Row

TITLE = "Llama 3.1 8B by torchtitan, on 8 and 128 ranks"

_PAGE = "benchmarks/llama3_h100_202412_torchtitan.md"

SOURCE = f"[torchtitan](https://github.com/pytorch/torchtitan/blob/b5bcd76c/{_PAGE})"

IMPORTS = ("torch.distributed.tensor.parallel",)
"""What takes long to import."""

VERSIONS: dict[str, str] = {}

_VOCABULARY = 128_256

_BATCH, _TOKENS = 2, 8192


def _trained(checkout: Path) -> Callable[[], object]:
    sys.path.insert(0, str(checkout))
    from torchtitan import utils
    from torchtitan.config_manager import JobConfig
    from torchtitan.models import llama3_configs, model_name_to_cls
    from torchtitan.optimizer import build_optimizers
    from torchtitan.parallelisms import ParallelDims, models_parallelize_fns

    config: Any = JobConfig()
    config.parse_args(["--job.config_file", str(checkout / "train_configs" / "llama3_8b.toml")])
    collection = utils.GarbageCollection(gc_freq=config.training.gc_freq)
    ranks = int(os.environ["WORLD_SIZE"])
    dimensions = ParallelDims(
        dp_shard=-1, dp_replicate=1, cp=1, tp=1, pp=1, world_size=ranks, enable_loss_parallel=False
    )
    torch.cuda.set_device(0)
    utils.init_distributed(config)
    mesh = dimensions.build_mesh(device_type="cuda")
    arguments = llama3_configs["8B"]
    arguments.norm_type = config.model.norm_type
    arguments.vocab_size, arguments.max_seq_len = _VOCABULARY, _TOKENS
    with torch.device("meta"):
        model = model_name_to_cls["llama3"].from_model_args(arguments)
    models_parallelize_fns["llama3"](model, mesh, dimensions, config)
    # That torch, of December 2024, always kept the root's parameters from forward to backward.
    model.set_reshard_after_forward(False, recurse=False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizers = build_optimizers([model], config)

    def steps() -> object:
        for step in range(1, 4):
            collection.run(step)
            inputs = torch.randint(_VOCABULARY, (_BATCH, _TOKENS)).to("cuda")
            labels = torch.randint(_VOCABULARY, (_BATCH, _TOKENS)).to("cuda")
            optimizers.zero_grad()
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(
                outputs.flatten(0, 1).float(), labels.flatten(0, 1)
            )
            del outputs
            loss.backward()
            parameters = list(model.parameters())
            utils.clip_grad_norm_(parameters, config.training.max_norm, foreach=True)
            optimizers.step()
        return model, optimizers

    return steps


_SEGMENTS = (
    "torchtitan does not say how the allocator was set. The plans have segments of a fixed size, as "
    "its script for several machines does. With the expandable ones of its other script they are "
    "4.0 and 3.1 % lower than measured."
)


def _row(ranks: int, gibibytes: float) -> Row:
    return Row(
        f"Llama 3.1 8B, FSDP2 on {ranks} ranks, {_BATCH} x {_TOKENS} tokens",
        "H100 96 GB",
        round(gibibytes * 2**30),
        round(0.1 * 2**30),
        _trained,
        (9, 0),
        ranks=ranks,
        reserved=True,
        why=_SEGMENTS,
    )


ROWS = [_row(8, 82.4), _row(128, 67.0)]
