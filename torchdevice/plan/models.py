"""``torchdevice plan --model``: the planned program if only a transformers model is named.

It makes the model of its configuration on the GPU, without weights, and trains it for two steps or
lets it generate. Its assumptions are the usual choices: AdamW as torch has it, PEFT's LoRA on all
linear layers, and for QLoRA weights in four bits as bitsandbytes stores them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.kernel.python.uncaught_errors import add_note
from torchdevice.plan import configurations, four_bits, model_changes, model_words, repeated_layers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

STEPS = 2
"""How many steps are trained: an optimizer makes its state in the first."""


def make(config: Any, dtype: torch.dtype) -> Any:
    """Return a configuration's model on the meta device: of the class that it names, if that
    generates text, else of the one that transformers has for that.

    Raises:
        ValueError: It is no model of language.
    """
    import transformers

    named = (
        getattr(transformers, each, object) for each in getattr(config, "architectures", None) or []
    )
    mappings = [
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ]
    if config.is_encoder_decoder:
        mappings.reverse()  # the other one has their decoders alone
    mapped: Any = (each[type(config)] for each in mappings if type(config) in each)
    # Some checkpoints name a class without the output layer.
    found: Any = next(
        (each for each in (*named, *mapped) if issubclass(each, transformers.GenerationMixin)), None
    )
    if found is None:
        raise ValueError(
            f"--model makes models that generate text, and {config.model_type!r} is none. Plan a "
            "program."
        )
    # As `from_config` of the classes that choose a model: of several parts it may be the text's.
    if found.config_class is (getattr(config, "sub_configs", None) or {}).get("text_config"):
        config = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        config.quantization_config = None  # the dtype is named instead
    try:
        with torch.device("meta"):
            made = found._from_config(config, dtype=dtype)
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} makes no {found.__name__} of the "
            f"configuration of {config.model_type!r}: {configurations.first_line(error)}"
        ) from error
    _forget_cpu_parameters(made, dtype)
    return made


def _forget_cpu_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Put a model's parameters on the meta device that ``torch.FloatTensor`` made on the CPU."""
    for module in model.modules():
        for name, each in module.named_parameters(recurse=False):
            if not each.is_meta:
                wanted = dtype if each.is_floating_point() else each.dtype
                empty = torch.empty_like(each, dtype=wanted, device="meta")
                setattr(module, name, torch.nn.Parameter(empty, each.requires_grad))


def materialized(model: torch.nn.Module, device: str) -> None:
    """Give a meta model's parameters and buffers memory of a device. Tied ones stay tied.

    Buffers that have values, and are on the CPU, keep them.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, each in [*parameters, *buffers]:
            if each.is_cpu and not isinstance(each, torch.nn.Parameter):
                setattr(module, name, each.to(device))
            if not each.is_meta:
                continue
            if id(each) not in made:
                made[id(each)] = _like(each, device)
            setattr(module, name, made[id(each)])


def _like(meta: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor or a parameter like one of the meta device."""
    if isinstance(meta, torch.nn.Parameter):
        return torch.nn.Parameter(torch.empty_like(meta, device=device), meta.requires_grad)
    # Zeros, because a plan keeps the values of integers, and some buffers are indices.
    return torch.zeros_like(meta, device=device)


def prepared(
    name: str,
    train: str | None,
    dtype: torch.dtype | None,
    *,
    checkpointing: bool = False,
    seq: int = 1,
    generate: int | None = None,
    strategy: str | None = None,
) -> Any:
    """Return a model on the GPU, as a way of training it begins.

    Args:
        name: See :func:`configurations.configuration`.
        train: ``"full"``, ``"lora"``, ``"qlora"``, or None for no training.
        dtype: The dtype of the weights; None for that of :func:`configurations.weights_dtype`.
        checkpointing: Whether activations are computed again in the backward pass. They are for
            ``"qlora"``, too, as ``peft.prepare_model_for_kbit_training`` has it.
        seq: The tokens of each sequence that it is given.
        generate: How many tokens it generates; None for none.
        strategy: See :func:`_placed`.

    Raises:
        ValueError: There is no such model here, it has no positions for so many tokens, or it
            cannot be trained so.
    """
    has_adapters = train in ("lora", "qlora")
    if has_adapters and not model_changes.has_peft():
        raise ValueError(
            f"--train {train} needs PEFT. Install it by 'pip install peft', or use --train full."
        )
    config = configurations.configuration(name)
    model = make(config, dtype or configurations.weights_dtype(name, config))
    more = generate or 0
    # A decoder of its own begins with one token, and does not go on with those of the encoder.
    _check_positions(model, max(seq, 1 + more) if config.is_encoder_decoder else seq + more)
    if train is not None or (generate is None and _has_linear_attention_alone(model.config)):
        # As transformers' Trainer does. Some models without attention raise an error if they cache.
        model.config.use_cache = False
    if train == "qlora":
        _quantize(model)
    if checkpointing or train == "qlora":
        _checkpoint(model, with_adapters=has_adapters)
    if has_adapters:
        model = model_changes.with_adapters(model)
    return _placed(model, strategy).train(train is not None)


def _has_linear_attention_alone(config: Any) -> bool:
    """Return whether no layer of a model keeps keys and values, as of Bamba with default sizes."""
    return {*(getattr(config, "layer_types", None) or ())} == {"linear_attention"}


def _quantize(model: Any) -> None:
    """Give a model weights in four bits and other parameters in float32, and freeze all of it."""
    four_bits.replace(model)
    for each in model.modules():  # some models then leave their weights to their layers
        if hasattr(each, "config"):
            each.config._is_quantized = True
    for each in model.parameters():  # as peft.prepare_model_for_kbit_training does
        each.requires_grad_(False)
        if each.is_floating_point():
            each.data = each.data.float()


def _checkpoint(model: Any, *, with_adapters: bool) -> None:
    """Let a model compute activations again in the backward pass.

    Raises:
        ValueError: It cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"transformers' {type(model).__name__} does not support gradient checkpointing, which "
            "--checkpointing and --train qlora ask for. Use --train lora or full."
        )
    model_changes.checkpoint(model)
    if with_adapters:
        model.enable_input_require_grads()


def _placed(model: Any, strategy: str | None) -> Any:
    """Return a meta model on the GPU.

    Args:
        model: The model.
        strategy: How ranks share the work: ``"ddp"``, which gives each the whole model, or
            ``"fsdp"``, FSDP2 on each layer, which gives each a part; None for one process.
    """
    if strategy is None:
        materialized(model, "cuda")
        return model
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    if strategy == "ddp":
        materialized(model, "cuda")
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])
    from torch.distributed.fsdp import fully_shard

    for each in _sharded(model):
        materialized(each, "cuda")  # one after another, because the whole may be too large
        fully_shard(each)
    materialized(model, "cuda")
    return fully_shard(model)


def _sharded(model: Any) -> list[torch.nn.Module]:
    """Return the modules of a model whose parameters FSDP2 gathers on their own, inner ones first.

    Those that share a parameter with another module are left to the whole model: torch 2.13 raises
    an error where two of them have it, and releases before train it as two.
    """
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    found = [each for each in model.modules() if type(each).__name__ in names]
    return [each for each in reversed(found) if not _shares(each, model)]


def _shares(part: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Return whether modules of a model outside a part have a parameter of the part."""
    own = {id(each) for each in part.parameters()}
    inside = set(part.modules())
    outside = (each for each in model.modules() if each not in inside)
    return any(id(given) in own for each in outside for given in each.parameters(recurse=False))


def _step(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step() -> None:
        # As transformers' Trainer and accelerate do it, the loss alone outlives the forward pass.
        with torch.autocast("cuda", torch.bfloat16, enabled=_is_mixed(model)):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _is_mixed(model: torch.nn.Module) -> bool:
    """Return whether a model has weights of several precisions, to be trained under autocast."""
    return len({each.dtype for each in model.parameters() if each.is_floating_point()}) > 1


_OFFSET = 2
"""By how many rows some tables of positions are longer than the model has positions."""


def _vocabulary(model: Any) -> Iterator[torch.Tensor]:
    """Yield the weights of the input and output embeddings of a model and of its parts."""
    for each in model.modules():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            # A part without such a table raises an error, or returns None.
            with contextlib.suppress(AttributeError, NotImplementedError):
                weight = getattr(getattr(each, name)(), "weight", None)
                if weight is not None:
                    yield weight


def _check_positions(model: Any, tokens: int) -> None:
    """Check that a model whose positions are a table has so many.

    Raises:
        ValueError: It has fewer.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int) or tokens <= most:
        return
    vocabulary = {id(each) for each in _vocabulary(model)}
    tables = (each for each in model.modules() if isinstance(each, torch.nn.Embedding))
    if any(
        most <= each.num_embeddings <= most + _OFFSET and id(each.weight) not in vocabulary
        for each in tables
    ):
        raise ValueError(
            f"{model.config.model_type!r} has {most} positions, fewer than {tokens} tokens. Use a "
            "smaller --seq."
        )


def work(model: Any, batch: int, length: int, *, train: bool, generate: int | None) -> None:
    """Train a model for two steps, let it generate, or call it once.

    Args:
        model: The model, on the GPU.
        batch: The number of sequences.
        length: The tokens of each.
        train: Whether to train it.
        generate: How many tokens to generate after them; None for none.
    """
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    if train:
        step = _step(model, tokens)
        for _ in range(STEPS):
            step()
    elif generate:
        with repeated_layers.repeated(model, generate):
            model.generate(
                tokens,
                max_new_tokens=generate,
                min_new_tokens=generate,
                do_sample=False,
                pad_token_id=0,
            )
    else:
        of_decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            model(input_ids=tokens, **of_decoder)


_DEFAULTS = (
    "{!r} has the sizes that transformers gives it by default, and they may make no whole model. "
    "Name a folder with the config.json of a checkpoint."
)


def _of_defaults(name: str) -> str:
    """Return the advice for a model that has sizes which nobody chose; nothing for others."""
    return _DEFAULTS.format(name) if configurations.is_architecture(name) else ""


_DOING = {
    "full": "in training",
    "lora": "with PEFT's adapters on all its linear layers",
    "qlora": "with PEFT's adapters on all its linear layers, which have four bits",
}


@contextlib.contextmanager
def _explained(given: Any) -> Iterator[None]:
    """Note on an error of a model what it was given."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        plain = "while generating" if given.generate else "when called"
        doing = _DOING.get(given.train, plain)
        add_note(
            error,
            f"{given.model!r} raised this {doing}, given nothing but tokens. If it needs more, "
            f"plan a program. {_of_defaults(given.model)}".rstrip(),
        )
        raise


def main(words: Sequence[str] | None = None) -> Any:
    """Run the program, and return the model, which lives as long as that of a script.

    Raises:
        SystemExit: The words name no model that can be made here.
    """
    given = model_words.parser().parse_args(words)
    try:
        import transformers
    except ImportError:
        sys.exit(
            "torchdevice: --model needs transformers. Install it by 'pip install transformers'."
        )
    transformers.logging.set_verbosity_error()  # what they say is for authors of programs
    warnings.simplefilter("ignore")  # PEFT's, too
    dtype = DTYPES[given.dtype] if given.dtype else None
    with _explained(given):
        try:
            model = prepared(
                given.model,
                given.train,
                dtype,
                checkpointing=given.checkpointing,
                seq=given.seq,
                generate=given.generate,
                strategy=given.strategy,
            )
        except ValueError as error:
            incomplete = _of_defaults(given.model) if error.__cause__ is not None else ""
            sys.exit(f"torchdevice: {error} {incomplete}".rstrip())
        is_trained = given.train is not None
        work(model, given.batch, given.seq, train=is_trained, generate=given.generate)
    return model


if __name__ == "__main__":
    model = main()
