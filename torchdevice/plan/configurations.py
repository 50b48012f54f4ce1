"""The configuration of a model that ``torchdevice plan --model`` names. Nothing is fetched."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def configuration(name: str) -> Any:
    """Return transformers' configuration of a model. Nothing is fetched.

    Args:
        name: A folder with a ``config.json``, a model in the Hub's cache, or an architecture such
            as ``llama``, which has the sizes that transformers gives it by default.

    Raises:
        ValueError: There is no such configuration here.
    """
    import transformers

    if is_architecture(name):
        found = transformers.AutoConfig.for_model(name)
        starts = getattr(found, "decoder_start_token_id", None)
        if found.is_encoder_decoder and starts is None:
            found.decoder_start_token_id = 0  # as the checkpoints have it
        if found.is_encoder_decoder and getattr(found, "pad_token_id", None) is None:
            found.pad_token_id = 0
        return found
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(f"--model {name!r} is a folder without a config.json.")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        # An OSError means of a folder that its file is broken, and of a name that it is not here.
        if os.path.exists(name) or not isinstance(error, OSError):
            raise ValueError(
                f"transformers {transformers.__version__} cannot read the configuration of "
                f"{name!r}: {first_line(error)}"
            ) from None
    near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING.keys()), n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"--model {name!r} is no folder with a config.json, is not in the Hub's cache, and is no "
        f"architecture of transformers.{meant} Run 'hf download {name} config.json', or name a "
        "folder or an architecture such as llama."
    )


def is_architecture(name: str) -> bool:
    """Return whether a name means an architecture, with the sizes that it has by default."""
    import transformers

    return name in transformers.CONFIG_MAPPING and not os.path.isdir(name)


def first_line(error: BaseException) -> str:
    """Return the class of an error, and the first line of its text."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text.removesuffix('.')}."


def weights_dtype(name: str, config: Any) -> torch.dtype:
    """Return the dtype in which transformers loads a model: that of its configuration, else that of
    the first weights in its folder; bfloat16 where neither says.

    Raises:
        ValueError: The weights are stored quantized.
    """
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        kind = quantized if isinstance(quantized, dict) else vars(quantized)
        raise ValueError(
            f"{name!r} has weights quantized by {kind.get('quant_method', 'a method')!s}, which "
            "--model does not plan. Name the dtype of the weights instead, as in --dtype bf16."
        )
    found: torch.dtype | None = getattr(config, "dtype", None)
    return found or next(_stored(name), torch.bfloat16)


def _stored(folder: str) -> Iterator[torch.dtype]:
    """Yield the dtypes of the weights in a folder that are floating-point numbers."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        from safetensors import safe_open  # here, because only a folder with weights needs it

        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 # it has no iterator
                name = _AS_TORCH_HAS_IT.get(file.get_slice(key).get_dtype())
                if name is not None:
                    yield name


_AS_TORCH_HAS_IT = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""A dtype as safetensors spells it -> torch's."""
