"""Tiny random models of the architectures that transformers knows, found from its auto mappings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 99
LENGTH = 7
MAX_PARAMETERS = 5_000_000

# The configs' names for sizes. A name is set only where the config has an int by that name.
SIZES = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "emb_dim": 32,
    "hidden_dim": 32,
    "d_embed": 32,
    "intermediate_size": 37,
    "ffn_dim": 37,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "d_ff": 37,
    "d_inner": 37,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_inner": 37,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_target_positions": 64,
    "max_source_positions": 64,
    "type_vocab_size": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "conv_dim": None,
}

SPECIAL_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclasses.dataclass
class TinyModel:
    """A built architecture.

    Attributes:
        name: The model type, such as ``"gpt2"``.
        family: The auto mapping it was found in: ``"causal"``, ``"masked"``, ``"seq2seq"``,
            ``"vision"``, ``"audio"``.
        model: The model, on the CPU, in evaluation mode.
        inputs: Keyword arguments of its forward pass, on the CPU.
        generates: Whether ``generate`` applies.
    """

    name: str
    family: str
    model: Any
    inputs: dict[str, torch.Tensor]
    generates: bool


def mappings() -> dict[str, dict[str, str]]:
    """Return, by family, model type -> class name."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "causal": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "masked": dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        "seq2seq": dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        "vision": dict(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        "audio": dict(auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
    }


def all_names() -> list[tuple[str, str]]:
    """Return every (family, model type) of the mappings, in their order."""
    return [(family, name) for family, names in mappings().items() for name in names]


def build(family: str, name: str) -> TinyModel:
    """Return an architecture's tiny model; raises as its building or run on the CPU does."""
    import transformers

    class_name = mappings()[family][name]
    class_name = class_name[0] if isinstance(class_name, (tuple, list)) else class_name
    model_class = getattr(transformers, class_name)
    config = _tiny_config(model_class.config_class)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(
            f"not tiny, {parameters} parameters: this config calls its sizes something unknown here"
        )
    torch.manual_seed(0)
    model = model_class(config).eval()
    inputs = _INPUTS[family](model, config)
    inputs.update(_labels(family, model, config))
    return TinyModel(
        name, family, model, inputs, family in ("causal", "seq2seq") and model.can_generate()
    )


def _tiny_config(config_class: type) -> Any:
    default = config_class()
    values = {
        k: v
        for k, v in SIZES.items()
        if v is not None and isinstance(getattr(default, k, None), int)
    }
    values.update({k: v for k, v in SPECIAL_TOKENS.items() if hasattr(default, k)})
    return config_class(**values)


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def _text(model: Any, config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}


def _seq2seq(model: Any, config: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "input_features":
        features = torch.randn(
            2, getattr(config, "num_mel_bins", 16), 128, generator=torch.Generator().manual_seed(1)
        )
        return {"input_features": features, "decoder_input_ids": _ids()}
    return {"input_ids": _ids(), "decoder_input_ids": _ids(5)}


def _image(model: Any, config: Any) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(
            2, channels, height, width, generator=torch.Generator().manual_seed(1)
        )
    }


def _sound(model: Any, config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    if model.main_input_name == "input_features":
        return {
            "input_features": torch.randn(
                2, 64, getattr(config, "feature_projection_input_dim", 16), generator=generator
            )
        }
    return {"input_values": torch.randn(2, 6000, generator=generator)}


_INPUTS: dict[str, Callable[[Any, Any], dict[str, torch.Tensor]]] = {
    "causal": _text,
    "masked": _text,
    "seq2seq": _seq2seq,
    "vision": _image,
    "audio": _sound,
}


def _labels(family: str, model: Any, config: Any) -> dict[str, torch.Tensor]:
    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    if family in ("vision", "audio"):
        return {"labels": torch.tensor([0, 1])}
    return {
        "labels": _ids(5)
        if family == "seq2seq" and model.main_input_name != "input_features"
        else _ids()
    }
