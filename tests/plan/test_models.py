"""``torchdevice plan --model``: transformers' models, compared with programs people write."""

from __future__ import annotations

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command

import torchdevice
from torchdevice.plan import configurations, four_bits, model_words, models
from torchdevice.tools.cli import main

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_engine

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}

LINEAR = 3 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512)
"""The elements of the linear layers but the last."""

OTHERS = 2 * 1000 * 256 + 7 * 256
"""The elements of both embeddings and the norms."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def planned(*words: str) -> Any:
    done = run_command("plan", "--json", *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (device,) = plan["devices"]
    return plan, device


PROGRAM = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.train()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.zeros(4, 128, dtype=torch.long, device="cuda")
for _ in range(2):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_plan_is_that_of_the_program_that_it_stands_for(folder: str, tmp_path: Path) -> None:
    plan, device = planned("--model", folder, "--batch", "4", "--seq", "128", "--train", "full")
    (tmp_path / "train.py").write_text(PROGRAM)
    _, expected = planned(str(tmp_path / "train.py"), folder)
    assert device["weights"] == expected["weights"] >= 2 * (LINEAR + OTHERS)
    assert device["optimizer state"] == expected["optimizer state"]
    assert device["peak"] - device["fragments"] == pytest.approx(
        expected["peak"] - expected["fragments"], rel=0.002
    )
    assert plan["program"] == f"{folder}: full fine-tuning with AdamW, 4 x 128 tokens"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--generate", "4"], "generating 4 tokens after 1 x 64 tokens"),
        (["--dtype", "fp32"], "one call without gradients, 1 x 64 tokens"),
        (
            ["--train", "full", "--checkpointing"],
            "full fine-tuning with AdamW, checkpointed, 1 x 64 tokens",
        ),
    ],
)
def test_what_can_be_planned(flags: list[str], said: str, folder: str) -> None:
    plan, device = planned("--model", folder, "--seq", "64", *flags)
    assert plan["program"] == f"{folder}: {said}"
    size = 4 if "fp32" in flags else 2
    assert device["weights"] == pytest.approx(size * (LINEAR + OTHERS), rel=0.02)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("train", ["lora", "qlora"])
def test_weights_that_are_not_trained_have_no_gradients(train: str, folder: str) -> None:
    pytest.importorskip("peft")
    _, device = planned("--model", folder, "--seq", "64", "--train", train)
    # Of each linear layer: two matrices in float32, and AdamW's two states of them.
    adapters = 3 * (4 * 256 * 2 + 2 * 64 + 3 * (256 + 512)) * model_words.RANK
    base = LINEAR / 2 + 4 * OTHERS if train == "qlora" else 2 * (LINEAR + OTHERS)
    assert device["weights"] == pytest.approx(base + 4 * adapters, rel=0.05)
    assert device["optimizer state"] == pytest.approx(8 * adapters, rel=0.25)  # blocks of 512 bytes


def test_a_name_that_means_nothing_is_refused() -> None:
    done = run_command("plan", "--model", "no/such-model")
    assert done.returncode == 1 and "plan of" not in done.stdout
    assert "--model 'no/such-model' is no folder with a config.json" in done.stderr
    assert "hf download no/such-model config.json" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "2", "train.py"], "--batch needs --model NAME"),
        (["--model", "llama", "train.py"], "--model plans a model without a program"),
        (
            ["--model", "llama", "--train", "full", "--generate", "3"],
            "--train and --generate are two plans",
        ),
        (["--model", "llama", "--seq", "0"], "'0' is not a number. Use a whole number from 1."),
        (["--model", "llama", "--checkpointing"], "--checkpointing is about training"),
        (["--model", "llama", "--world-size", "2"], "--world-size is about training"),
        (["--model", "llama", "--train", "full", "--strategy", "ddp"], "Add --world-size N"),
        (
            ["--model", "llama", "--train", "qlora", "--change", "fsdp:2"],
            "FSDP of weights in four bits is not planned",
        ),
    ],
)
def test_words_that_contradict_each_other(words: list[str], said: str) -> None:
    done = run_command("plan", *words)
    assert done.returncode == 2 and said in done.stderr


def test_the_memory_of_a_layer_in_four_bits() -> None:
    with torchdevice.simulate(compute="meta", values="assume"):
        plain = torch.nn.Linear(1024, 512, bias=True, device="cuda", dtype=torch.bfloat16)
        layer = four_bits.FourBitLinear(plain)
        before = torch.cuda.memory_allocated()
        x = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        result = layer(x)
        kept = torch.cuda.memory_allocated() - before
        assert kept == 4 * 1024 * 2 + 4 * 512 * 2, "the weight in bfloat16 is gone"
        result.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape and result.dtype == torch.bfloat16
        number = 1024 * 512
        assert layer.weight.nbytes == number // 2 and layer.scales.nbytes == number // 64
        assert layer.scales_of_scales.nbytes == 4 * math.ceil(number / 64 / 256)


class Layers(torch.nn.Module):
    """Layers as a model of transformers has them, of which four are kept."""

    _keep_in_fp32_modules = ("inner.float32",)

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.inner = torch.nn.ModuleDict(
            {name: torch.nn.Linear(2, 2) for name in ("second", "float32", "float32_2")}
        )
        self.tied = torch.nn.Linear(2, 2)
        self.embedding = torch.nn.Embedding(2, 2)
        self.embedding.weight = self.tied.weight
        self.output = torch.nn.Linear(2, 2)
        self.last = torch.nn.Linear(2, 2, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.output


def test_layers_that_are_kept_have_no_four_bits() -> None:
    model = Layers()
    four_bits.replace(model)
    replaced = [
        name for name, each in model.named_modules() if isinstance(each, four_bits.FourBitLinear)
    ]
    assert replaced == ["first", "inner.second", "inner.float32_2"]


def test_a_layer_in_four_bits_computes_what_is_cast_to_its_weight() -> None:
    layer = four_bits.FourBitLinear(torch.nn.Linear(4, 2))
    cast = torch.ones(3, 4).to(layer.weight.dtype)
    assert cast.dtype == torch.uint8 and layer(cast).dtype == torch.float32


@pytest.mark.parametrize("words", [(), ("--train", "full")])
def test_a_model_with_a_buffer_of_positions(words: Any, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    config = {"model_type": "bert", "num_attention_heads": 4, **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan, _ = planned("--model", str(tmp_path), "--seq", "512", *words)
    assert plan["finished"]
    model = transformers.BertModel(transformers.BertConfig(num_attention_heads=4, **small))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert torchdevice.plan(model, tokens)["finished"] and model.device.type == "cpu"
    done = run_command("plan", "--model", str(tmp_path), *words)
    assert done.returncode == 1
    assert "'bert' has 512 positions, fewer than 2048 tokens. Use a smaller --seq." in done.stderr


def test_a_vocabulary_as_long_as_the_positions() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    long = {"vocab_size": 1024, "max_position_embeddings": 1024}
    rotary = transformers.MistralConfig(**sizes, **heads, **long)
    models._check_positions(models.make(rotary, torch.float32), 1500)
    bart = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    for tied in (True, False):
        table = transformers.BartConfig(**bart, **long, tie_word_embeddings=tied)
        with pytest.raises(ValueError, match="'bart' has 1024 positions, fewer than 1500 tokens"):
            models._check_positions(models.make(table, torch.float32), 1500)


def test_a_decoder_of_its_own_does_not_go_on_with_the_encoders_tokens(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100}
    config = {"model_type": "bart", "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for seq, generate, fits in ((60, 30, True), (60, 63, True), (60, 64, False), (65, 5, False)):
        words = ("--model", str(tmp_path), "--seq", str(seq), "--generate", str(generate))
        done = run_command("plan", "--batch", "1", *words)
        assert (done.returncode == 0) is fits, done.stderr
        assert fits or "'bart' has 64 positions, fewer than 65 tokens" in done.stderr


def test_an_encoder_and_decoder_by_its_architecture() -> None:
    plan, _ = planned("--model", "t5", "--train", "full", "--seq", "64")
    assert plan["finished"]


OF_BOTH = sorted(
    each.model_type
    for each in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if each in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and each().is_encoder_decoder
)
"""Architectures of an encoder and a decoder of which transformers also has the decoder alone."""


@pytest.mark.parametrize("name", OF_BOTH)
def test_a_decoder_is_not_planned_without_its_encoder(name: str) -> None:
    found = type(models.make(configurations.configuration(name), torch.bfloat16)).__name__
    assert not found.endswith("ForCausalLM")


OF_PARTS = sorted(
    config.model_type
    for config, found in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items()
    if found.config_class is (config.sub_configs or {}).get("text_config")
)
"""Architectures of several parts, of which the one of the text generates."""


@pytest.mark.skipif(not OF_PARTS, reason="this release of transformers has none")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OF_PARTS)
def test_the_text_of_a_model_of_several_parts(name: str) -> None:
    config = configurations.configuration(name)
    try:
        with torch.device("meta"):
            expected = transformers.AutoModelForCausalLM.from_config(config)
    except TypeError as error:
        pytest.skip(f"transformers' defaults make no model: {error}")
    made = models.make(configurations.configuration(name), torch.float32)
    shapes = [{key: each.shape for key, each in of.state_dict().items()} for of in (made, expected)]
    assert type(made) is type(expected) and shapes[0] == shapes[1]


@pytest.mark.parametrize("named", [["BartModel"], ["NoSuchClass"], [], None])
def test_a_checkpoint_that_names_no_class_that_generates(named: Any) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    config = transformers.BartConfig(**sizes, architectures=named)
    found = models.make(config, torch.float32)
    assert type(found) is transformers.BartForConditionalGeneration
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, architectures=named)
    assert type(models.make(config, torch.float32)) is transformers.LlamaForCausalLM


def test_generation_of_an_encoder_and_deeper_decoder() -> None:
    _, device = planned("--model", "blenderbot", "--seq", "64", "--generate", "2")
    with torch.device("meta"):
        whole = transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig())
    size = 2 * sum(each.numel() for each in whole.parameters())
    assert device["weights"] == pytest.approx(size, rel=0.001)


def test_defaults_that_make_no_model_are_named() -> None:
    done = run_command("plan", "--model", "dots1", "--seq", "8")
    assert done.returncode == 1 and "'dots1' has the sizes that transformers" in done.stderr
    assert "TypeError" in done.stderr


def test_four_bits_of_a_transposed_layer(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    _, device = planned("--model", str(tmp_path), "--train", "qlora", "--seq", "128")
    elements = 12 * 64 * 64 * 2  # of the layers' matrices
    # The adapters of PEFT are on the same four layers of each block.
    adapters = 4 * model_words.RANK * 2 * (64 + 3 * 64 + 2 * 64 + 2 * (64 + 4 * 64))
    others = 4 * (100 * 64 + 128 * 64 + 5 * 2 * 64 + 2 * (3 + 1 + 4 + 1) * 64)
    assert device["weights"] == pytest.approx(elements / 2 + adapters + others, rel=0.05)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is a folder without a config.json"),
        ({"config.json": "{ broken"}, "cannot read the configuration of .* not a valid JSON file"),
        ({"config.json": "[1]"}, "cannot read the configuration of .* a `model_type` key"),
        ({"config.json": '{"model_type": "nosuch"}'}, "cannot read .* model type `nosuch`"),
    ],
)
def test_a_folder_without_a_configuration_is_explained(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        configurations.configuration(str(tmp_path))


def test_a_name_like_that_of_an_architecture() -> None:
    with pytest.raises(ValueError, match="Did you mean 'llama'"):
        configurations.configuration("lama")


def test_the_dtype_is_that_in_which_transformers_loads_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**{**SMALL, "dtype": None})
    config.save_pretrained(tmp_path)

    def dtype() -> torch.dtype:
        name = str(tmp_path)
        return configurations.weights_dtype(name, configurations.configuration(name))

    assert dtype() == torch.bfloat16
    weights = transformers.LlamaForCausalLM(config).state_dict()
    halves = {name: each.half() for name, each in weights.items() if "norm" not in name}
    save_file({**weights, **halves}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert dtype() == loaded.dtype


def test_quantized_weights_are_planned_in_a_dtype_that_is_named(
    folder: str, tmp_path: Path
) -> None:
    quantized = {**SMALL, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ValueError, match="quantized by gptq, which --model does not plan"):
        models.prepared(folder, None, None)
    config = configurations.configuration(folder)
    assert type(models.make(config, torch.bfloat16)) is transformers.LlamaForCausalLM


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("flags", "said", "part"),
    [
        (("--world-size", "4"), "AdamW, DDP, 1 x 64 tokens, rank 0 of 4", 1),
        (("--world-size", "4", "--strategy", "fsdp"), "AdamW, FSDP, 1 x 64 tokens, rank 0 of 4", 4),
        (("--change", "fsdp:4"), "AdamW, FSDP, 1 x 64 tokens, rank 0 of 4", 4),
        # By another process.
        (("--change", "fsdp:4", "--fits", "t4"), "AdamW, FSDP, 1 x 64 tokens, rank 0 of 4", 4),
    ],
)
def test_ranks_train_a_model_by_a_strategy(
    flags: tuple[str, ...], said: str, part: int, folder: str
) -> None:
    plan, device = planned("--model", folder, "--seq", "64", "--train", "full", *flags)
    assert plan["program"].endswith(said) and "not changed" not in plan
    state = 2 * 2 * (LINEAR + OTHERS) / part
    assert device["optimizer state"] == pytest.approx(state, rel=0.05)
    sent = {each["collective"]: each["bytes"] for each in plan["traffic"]["collectives"]}
    gradients = sent["all-reduce"] if part == 1 else sent["reduce-scatter"]
    assert gradients == pytest.approx(2 * (LINEAR + OTHERS), rel=0.05)


TIED = {
    "model_type": "bert",
    "is_decoder": True,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 20000,
}
"""transformers does not split its embeddings, whose weight the output layer has, too."""

RANKS = """
import sys, torch
from torchdevice.plan import models
model = models.main(sys.argv[1:])
sys.stdout.write(f"allocated {torch.cuda.max_memory_allocated()}\\n")
torch.distributed.destroy_process_group()
"""


def test_a_tied_weight_is_sharded_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    (tmp_path / "ranks.py").write_text(RANKS)
    words = ("--train", "full", "--seq", "8", "--strategy", "fsdp")
    ranks = ("run", "--ranks", "2", "--target", "simulated:cuda:2", str(tmp_path / "ranks.py"))
    done = run_command(*ranks, str(tmp_path), *words, "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    plan, device = planned("--world-size", "2", "--model", str(tmp_path), *words, "--dtype", "fp32")
    state = 4 * 2 * 20000 * 64 / 2
    assert plan["finished"] and state < device["optimizer state"] < 1.2 * state
    allocated = device["peak"] - device["fragments"] - device["workspaces"]
    assert {int(each.split()[-1]) for each in done.stdout.splitlines()} == {allocated}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--strategy", "fsdp", "--change", "checkpointing"), "Add --world-size N"),
        (("--strategy", "fsdp", "--world-size", "2", "--change", "qlora"), "four bits is not"),
        (("--change", "qlora+fsdp:2"), "four bits is not"),
    ],
)
def test_strategies_that_are_not_planned(
    flags: tuple[str, ...], said: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["plan", "--model", folder, "--train", "full", *flags])
    assert said in capsys.readouterr().err


SHORTENED = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)

WAYS = ("--generate 2", "--train lora", "--train qlora", "--train full")

RELEASES = {"transformers": "5.24", "peft": "0.21"}
"""The releases that :data:`RAISES` holds for."""

RAISES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "blt",
            "cohere_compass_text",
            "dbrx",
            "deepseek_v2",
            "dots1",
            "gemma4_assistant",
            "gemma4_unified_assistant",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "lfm2_moe",
            "ministral",
            "musicgen",
            "musicgen_melody",
            "nemotron",
            "qwen4_exp",
            "qwen4_exp_text",
            "reformer",
            "voxtral_realtime",
            "xmod",
        ),
        WAYS,
    ),
    **dict.fromkeys(
        (
            "afmoe",
            "cpmant",
            "ctrl",
            "fsmt",
            "gpt_neox_japanese",
            "granite_speech",
            "granite_speech_plus",
            "jetmoe",
            "longcat_flash",
            "mamba",
            "openai-gpt",
            "xlm",
        ),
        ("--train qlora",),
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid"), ("--generate 2",)),
    **dict.fromkeys(("git",), ("--train lora", "--train qlora", "--train full")),
    **dict.fromkeys(("xlnet",), ("--generate 2", "--train qlora")),
}
"""Architecture -> the ways in which it ends by an error of transformers 5.24 or PEFT 0.21: with the
default sizes there is no whole model, it needs more than tokens, or it cannot be trained so.
"""

LEFT_OUT = frozenset(
    ["gemma3n", "gemma3n_text", "hrm_text", "jamba", "recurrent_gemma", "xlstm", "zamba", "zamba2"]
)
"""Few layers make no whole model of these, and all of them take long; gemma3n needs timm."""

OF_TEXT = sorted(
    {
        config.model_type
        for mapping in (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
            transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        )
        for config in mapping
    }
    - LEFT_OUT
)


def shortened(config: Any) -> Any:
    """Return a configuration with a layer of each kind, or with two."""
    parts = [each for each in vars(config).values() if hasattr(each, "model_type")]
    for each in (config, *parts):
        kinds = [*dict.fromkeys(vars(each).get("layer_types") or ["both", "alike"])]
        for name in SHORTENED:
            name = each.attribute_map.get(name, name)
            if isinstance(vars(each).get(name), int):
                setattr(each, name, min(len(kinds), getattr(each, name)))
        if vars(each).get("layer_types"):
            each.layer_types = kinds
    return config


def reason(name: str, way: str) -> str:
    """Return why an architecture cannot be planned; empty if it can be."""
    try:
        with torchdevice.simulate("cuda", memory="1TiB", compute="meta", values="assume"):
            models.main([name, "--seq", "32", *way.split()])
    except SystemExit as exited:
        return str(exited)
    except Exception as error:
        return "\n".join([str(error), *error.__notes__])
    return ""


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid"])
def test_a_model_without_attention_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = configurations.configuration
    monkeypatch.setattr(configurations, "configuration", lambda given: shortened(own(given)))
    assert reason(name, "") == ""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OF_TEXT)
def test_architectures_are_planned_or_the_reason_is_shown(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    own = configurations.configuration
    monkeypatch.setattr(configurations, "configuration", lambda given: shortened(own(given)))
    found = reason(name, way)
    # Other releases have other defects. Whatever is raised must name the model.
    if all(metadata.version(package).startswith(release) for package, release in RELEASES.items()):
        assert bool(found) is (way in RAISES.get(name, ()))
    assert not found or f"{name!r}" in found or "does not support gradient checkpointing" in found
