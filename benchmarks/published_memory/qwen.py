"""Fine-tuning Qwen3.5 on one GPU and several ranks, a step of Qwen3-8B: FakeGPU's figures.

Source: https://github.com/FanBB2333/FakeGPU at commit 7d5cf83c,
``docs/llm-sft-memory-estimation.md`` and
``docs/llm-inference-estimation.md``, measured by the workers in ``verification/`` (torch 2.8 with
CUDA 12.8 on an RTX PRO 5000, torch 2.12 with CUDA 13 on an RTX 3090 Ti; transformers 5.12.1). The
steps here are those of the workers. The linear layers in four bits are the checkout's own, without
the search for the codes, which needs values.

The sizes of the models are those of ``config.json`` on the Hub. Their parameters are as many as the
source reports.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_memory.rows import Row

TITLE = "Qwen3.5 and Qwen3, by transformers, PEFT, FSDP and FSDP2"

SOURCE = "[FakeGPU](https://github.com/FanBB2333/FakeGPU/blob/7d5cf83c/docs/llm-sft-memory-estimation.md)"

IMPORTS = (
    "peft",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What takes long to import."""

VERSIONS = {"transformers": "5.12.1"}
"""The versions that the source names and that the memory depends on."""

_SIZES = {"0.8B": (1024, 3584, 752_393_024), "2B": (2048, 6144, 1_881_825_088)}
"""Name -> hidden size, size between the layers of an MLP, parameters."""

_BLACKWELL, _AMPERE = ("RTX PRO 5000", (12, 0)), ("RTX 3090 Ti", (8, 6))


def _model(name: str) -> Any:
    """Return the text model on the GPU in bfloat16, its caches off."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    hidden, between, parameters = _SIZES[name]
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=248_320,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        made: Any = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert sum(each.numel() for each in made.parameters()) == parameters
    made.config.use_cache = False
    return made.train()


def _with_adapters(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear"
    )
    return peft.get_peft_model(model, config)


def _in_four_bits(model: Any, checkout: Path, *, nested: bool) -> Any:
    """Return a model with the checkout's linear layers of four bits, and its adapters."""
    sys.path.insert(0, str(checkout))
    from verification import native_nf4

    def packed(
        weight: torch.Tensor, *, block_size: int, scale_block_size: int, **rest: Any
    ) -> tuple[Any, ...]:
        blocks = -(-weight.numel() // block_size)
        empty = functools.partial(torch.empty, device=weight.device)
        found = [
            empty(blocks * block_size // 2, dtype=torch.uint8),
            empty(blocks),
            empty(256, 2, dtype=weight.dtype),
        ]
        if not nested:
            return (*found, empty(0), empty(0), empty(0))
        found[1] = empty(blocks, dtype=torch.uint8)
        return (*found, empty(-(-blocks // scale_block_size)), empty(()), empty(256, 1))

    native_nf4._quantize_weight = packed
    converted, _ = native_nf4.convert_model_to_native_nf4_lora(
        model,
        rank=8,
        alpha=16,
        dropout=0.0,
        block_size=64,
        double_quantization=nested,
        scale_block_size=256,
        target_modules="all-linear",
        chunk_blocks=16_384,
    )
    return converted.to("cuda")


def _batch(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(100, 248_320, (1, length), device="cpu")
    labels = tokens.clone()
    labels[:, : length // 2] = -100
    places = torch.arange(length, device="cpu").view(1, 1, length).expand(3, 1, length).clone()
    return {
        "input_ids": tokens.to("cuda"),
        "labels": labels.to("cuda"),
        "position_ids": places.to("cuda"),
    }


def _step(model: Any, length: int, accumulated: int) -> Callable[[], object]:
    batches = [_batch(length) for _ in range(accumulated)]
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)

    def step() -> object:
        for number, batch in enumerate(batches, start=1):
            outputs = model(**batch, use_cache=False)
            loss = outputs.loss / accumulated
            loss.backward()
            if number < accumulated:
                del outputs, loss
        optimizer.step()
        return outputs, loss, model

    return step


def _tuned(
    checkout: Path,
    *,
    size: str,
    method: str,
    length: int,
    checkpointed: bool = False,
    accumulated: int = 1,
) -> Callable[[], object]:
    model = _model(size)
    if method == "LoRA":
        model = _with_adapters(model)
    elif method != "full":
        model = _in_four_bits(model, checkout, nested=method == "nested QLoRA")
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if method != "full":
            model.enable_input_require_grads()
    return _step(model.train(), length, accumulated)


def _sharded_wholly(checkout: Path, *, length: int) -> Callable[[], object]:
    """FSDP's FULL_SHARD of each layer, without prefetching."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.distributed.init_process_group("nccl")
    model = _model("0.8B")
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cuda:0"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=None,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=False,
    )
    del model
    return _step(sharded, length, 1)


def _adapters_sharded(checkout: Path, *, length: int, ranks: int) -> Callable[[], object]:
    """FSDP2 of each layer of a model with adapters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    model = _with_adapters(_model("0.8B")).train()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return _step(model, length, 1)


def _answered(checkout: Path) -> Callable[[], object]:
    """A prompt of nine tokens to Qwen3-8B, and two tokens of an answer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.zeros(1, 9, dtype=torch.long, device="cuda")

    def step() -> object:
        mask = torch.ones_like(tokens)
        with torch.inference_mode():
            outputs = model(input_ids=tokens, attention_mask=mask, use_cache=True)
            following = torch.argmax(outputs.logits[:, -1, :], dim=-1, keepdim=True)
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            past = outputs.past_key_values
            outputs = model(
                input_ids=following, attention_mask=mask, past_key_values=past, use_cache=True
            )
        return outputs, model

    return step


def _gib(figure: float) -> int:
    return round(figure * 2**30)


_DIGITS = _gib(0.001)


def _row(case: str, figure: float, work: Any, gpu: Any = _BLACKWELL, **more: Any) -> Row:
    name, capability = gpu
    return Row(case, name, _gib(figure), _DIGITS, work, capability, **more)


def _on_one(
    size: str, method: str, length: int, figure: float, gpu: Any = _BLACKWELL, **more: Any
) -> Row:
    extras = ", checkpointed" if more.get("checkpointed") else ""
    extras += f", {more['accumulated']} accumulated" if "accumulated" in more else ""
    work = functools.partial(_tuned, size=size, method=method, length=length, **more)
    return _row(f"Qwen3.5-{size}, {method}, {length} tokens{extras}", figure, work, gpu)


def _adapters_on(ranks: int, length: int, figure: float, gpu: Any = _BLACKWELL) -> Row:
    work = functools.partial(_adapters_sharded, length=length, ranks=ranks)
    return _row(
        f"Qwen3.5-0.8B, LoRA, {length} tokens, FSDP2 on {ranks} ranks",
        figure,
        work,
        gpu,
        ranks=ranks,
    )


def _full_on_two(length: int, figure: float, gpu: Any = _BLACKWELL) -> Row:
    work = functools.partial(_sharded_wholly, length=length)
    return _row(f"Qwen3.5-0.8B, full, {length} tokens, FSDP on 2 ranks", figure, work, gpu, ranks=2)


ROWS = [
    _on_one("0.8B", "full", 16, 6.626, accumulated=2),
    _on_one("0.8B", "full", 128, 6.687),
    _on_one("0.8B", "full", 128, 6.679, checkpointed=True),
    _on_one("0.8B", "full", 16, 6.630, _AMPERE),
    _on_one("0.8B", "LoRA", 16, 1.756),
    _on_one("0.8B", "LoRA", 128, 2.696),
    _on_one("0.8B", "LoRA", 128, 1.876, checkpointed=True),
    _on_one("0.8B", "LoRA", 128, 1.876, _AMPERE, checkpointed=True),
    _on_one("2B", "full", 16, 15.939, accumulated=2),
    _on_one("2B", "LoRA", 16, 3.868),
    _on_one("2B", "LoRA", 128, 4.959),
    _on_one("2B", "LoRA", 128, 3.974, checkpointed=True),
    _on_one("0.8B", "QLoRA", 16, 1.072),
    _on_one("0.8B", "QLoRA", 128, 2.007),
    _on_one("0.8B", "QLoRA", 128, 1.192, checkpointed=True),
    _on_one("2B", "QLoRA", 16, 2.039),
    _on_one("2B", "QLoRA", 128, 2.136, checkpointed=True),
    _on_one("0.8B", "nested QLoRA", 16, 1.051),
    _on_one("0.8B", "nested QLoRA", 16, 1.051, _AMPERE),
    _on_one("0.8B", "nested QLoRA", 128, 1.986),
    _on_one("0.8B", "nested QLoRA", 128, 1.171, checkpointed=True),
    _on_one("0.8B", "nested QLoRA", 128, 1.171, _AMPERE, checkpointed=True),
    _on_one("2B", "nested QLoRA", 16, 1.979),
    _on_one("2B", "nested QLoRA", 128, 2.077, checkpointed=True),
    _full_on_two(16, 3.308),
    _full_on_two(128, 3.357),
    _full_on_two(16, 3.308, _AMPERE),
    _full_on_two(128, 3.357, _AMPERE),
    _adapters_on(2, 16, 1.961),
    _adapters_on(4, 16, 1.593),
    _adapters_on(4, 64, 1.801),
    _adapters_on(2, 128, 2.689),
    _adapters_on(4, 128, 2.324),
    _adapters_on(2, 16, 1.961, _AMPERE),
    _adapters_on(4, 16, 1.594, _AMPERE),
    _adapters_on(4, 64, 1.803, _AMPERE),
    _adapters_on(2, 128, 2.687, _AMPERE),
    _adapters_on(4, 128, 2.322, _AMPERE),
    Row(
        "Qwen3-8B, 9 tokens, 2 generated",
        _BLACKWELL[0],
        16_396_630_528,
        1,
        _answered,
        _BLACKWELL[1],
    ),
]
