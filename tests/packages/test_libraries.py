"""Libraries' own code: they keep fallbacks, and give a program the package it asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_program
from safetensors.torch import save_file

import torchdevice

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_engine


def small(implementation: str | None) -> Any:
    """Return a tiny Llama on the GPU with an implementation of attention."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, max_position_embeddings=64, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    return (
        transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
        .cuda()
        .eval()
    )


@pytest.mark.parametrize("target", ["cpu", "simulated:a100", "simulated:mps"])
def test_a_model_with_flash_attention_2(target: str) -> None:
    with torchdevice.portable(target=target) as scope:
        plain, asked = small(None), small("flash_attention_2")
        assert plain.config._attn_implementation == "sdpa", (
            "transformers prefers nothing that it was not asked for"
        )
        assert asked.config._attn_implementation == "flash_attention_2"
        ids = torch.arange(2 * 7, device="cuda").reshape(2, 7)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0  # padding on the left
        expected, found = (each(ids, attention_mask=mask).logits for each in (plain, asked))
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=0.02, rtol=0.02)
        drawn = [
            each.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
            for each in (plain, asked)
        ]
        assert torch.equal(*drawn)
        asked.train()(ids, labels=ids).loss.backward()
        assert all(each.grad is not None for each in asked.parameters())
    assert "flash_attn_varlen_func" in str(scope.report())
    module: Any = sys.modules["transformers.modeling_flash_attention_utils"]
    assert module._loaded_implementation is None and module._flash_fn is None
    assert not transformers.utils.is_flash_attn_2_available()


def test_transformers_own_questions() -> None:
    from transformers.utils.import_utils import _is_package_available

    with torchdevice.portable(target="cpu"):
        assert not _is_package_available("flash_attn")[0]
        assert transformers.utils.is_flash_attn_2_available()  # as remote code asks
        assert transformers.utils.is_flash_attn_greater_or_equal("2.1.0")
    with torchdevice.portable(target="cpu", packages="absent"):
        assert not transformers.utils.is_flash_attn_2_available()
        with pytest.raises(ImportError, match="doesn't seem to be installed"):
            small("flash_attention_2")
    assert not transformers.utils.is_flash_attn_2_available()


def test_imports_of_remote_code_that_transformers_checks(tmp_path: Path) -> None:
    from transformers.dynamic_module_utils import check_imports

    path = tmp_path / "modeling.py"
    path.write_text(
        "from flash_attn import flash_attn_func\nfrom flash_attn.bert_padding import pad_input\n"
    )
    with torchdevice.portable(target="cpu"):
        assert check_imports(path) == []
    with pytest.raises(ImportError, match="flash_attn"):
        check_imports(path)


REMOTE = """
import torch
from flash_attn import flash_attn_func
from flash_attn.layers.rotary import apply_rotary_emb
from transformers import PretrainedConfig, PreTrainedModel

class SmallConfig(PretrainedConfig):
    model_type = "small-remote"

class SmallModel(PreTrainedModel):
    config_class = SmallConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = torch.nn.Linear(16, 48)
        self.post_init()

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).unbind(2)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), torch.tensor([1.0, 0.1], device=x.device))
        q, k = (apply_rotary_emb(each, angles.cos(), angles.sin()) for each in (q, k))
        return flash_attn_func(q, k, v, causal=True).flatten(2)
"""


def with_remote_code(folder: Path) -> Path:
    """Make the folder of a model whose own code imports flash_attn, and return it."""
    folder.mkdir()
    (folder / "modeling_small.py").write_text(REMOTE)
    names = {"AutoConfig": "modeling_small.SmallConfig", "AutoModel": "modeling_small.SmallModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "small-remote", "auto_map": names})
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        # Small, because the softmax of large products turns bfloat16's last bit into other weights.
        "weight": torch.randn(48, 16, generator=generator) / 4,
        "bias": torch.randn(48, generator=generator),
    }
    save_file(
        {f"inner.{name}": value for name, value in weights.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("target", ["cpu", "simulated:a100", "simulated:mps"])
def test_a_model_whose_remote_code_imports_it(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = with_remote_code(tmp_path / f"small_{target.replace(':', '_')}")
    with torchdevice.portable(target=target) as scope:
        model = transformers.AutoModel.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.bfloat16
        ).cuda()
        x = torch.randn(2, 5, 16, device="cuda", dtype=torch.bfloat16)
        out = model(x)
        out.float().square().mean().backward()
        assert out.shape == (2, 5, 16) and model.inner.weight.grad.isfinite().all()
        assert "flash_attn_interface.flash_attn_func" in str(scope.report())
        earlier = model(x[:, :3])
        torch.testing.assert_close(earlier, out[:, :3], rtol=0.02, atol=0.02)  # causal


@pytest.mark.parametrize("target", ["cpu", "simulated:a100", "simulated:mps"])
def test_a_unet_of_diffusers_that_is_asked_for_xformers(target: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    with torchdevice.portable(target=target) as scope:
        model = diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16), layers_per_block=1, sample_size=8, cross_attention_dim=8, attention_head_dim=4,
            norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ).cuda()  # fmt: skip
        given = torch.randn(1, 4, 8, 8, device="cuda"), 1, torch.randn(1, 3, 8, device="cuda")
        assert not diffusers.utils.is_xformers_available(), (
            "diffusers prefers nothing that it was not asked for"
        )
        expected = model(*given).sample
        assert "xformers" not in str(scope.report())
        model.enable_xformers_memory_efficient_attention()
        torch.testing.assert_close(model(*given).sample, expected)
        assert "xformers.ops.memory_efficient_attention" in str(scope.report())
        from xformers.ops import MemoryEfficientAttentionCutlassOp

        model.enable_xformers_memory_efficient_attention(MemoryEfficientAttentionCutlassOp)
        torch.testing.assert_close(model(*given).sample, expected)
    assert sys.modules["diffusers.models.attention_processor"].__dict__.get("xformers") is None


def test_what_is_said_of_a_package_that_nothing_stands_in_for() -> None:
    said = {
        "vllm": (
            "vllm is a server of language models. Use the generate() of the transformers library."
        ),
        "nvidia.dali": (
            "nvidia.dali, NVIDIA's loader of data on GPUs, needs CUDA. Use torch.utils.data."
        ),
        "flash_attn.losses": "torchdevice stands in for a part of it",
    }
    for name, note in said.items():
        with pytest.raises(ModuleNotFoundError) as caught:
            with torchdevice.portable(target="cpu"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        notes = caught.value.__notes__
        assert len(notes) == 1 and note in notes[0]


@pytest.mark.parametrize(
    ("inner", "remedy"),
    [("mmcv._ext", "Install mmcv-lite."), ("detectron2._C", "Build it with FORCE_CUDA=0.")],
)
def test_what_is_said_of_a_compiled_part(inner: str, remedy: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        with torchdevice.portable(target="cpu", packages="absent"):
            raise ModuleNotFoundError(f"No module named {inner!r}", name=inner)
    (note,) = caught.value.__notes__
    assert remedy in note and "without packages='absent'" in note


def test_run_says_it_in_one_line(tmp_path: Path) -> None:
    done = run_program(tmp_path, "import torch_cluster\n", options=["--target", "cpu"])
    last = done.stderr.splitlines()[-2:]
    assert last[0] == "ModuleNotFoundError: No module named 'torch_cluster'"
    assert last[1].startswith("torch_cluster is a library of clustering") and done.returncode == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "simulated:a100", "simulated:mps"])
def test_a_model_in_4_bits_with_adapters(target: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    program = """
        import bitsandbytes as bnb
        import torch
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

        print(bnb.cextension.BNB_BACKEND)
        config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, vocab_size=32)
        LlamaForCausalLM(config).save_pretrained("tiny")
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                  bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=four, device_map={"": 0})
        model = prepare_model_for_kbit_training(model)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        optimizer = bnb.optim.PagedAdamW8bit([each for each in model.parameters() if each.requires_grad], lr=0.02)
        ids = torch.arange(16, device="cuda")[None]
        losses = []
        for _ in range(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
        print(layer.weight.dtype, layer.weight.device == ids.device, losses[-1] < losses[0])
    """
    done = run_program(tmp_path, program, options=["--target", target])
    assert done.stdout.splitlines() == ["CPU", "torch.uint8 True True"], done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "simulated:a100", "simulated:mps"])
def test_a_training_of_a_block_that_logs_by_nvml(target: str, tmp_path: Path) -> None:
    program = """
        import torch
        from mamba_ssm import Mamba

        try:
            import pynvml
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            device = None
            print(error)
        torch.manual_seed(0)
        model = Mamba(d_model=16, d_state=8, d_conv=4, expand=2).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(2, 24, 16, device="cuda")
        losses = []
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16):
                loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if device is not None:
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            print(pynvml.nvmlDeviceGetName(device), memory.used >= torch.cuda.memory_reserved() > 0)
        print(losses[-1] < losses[0])
    """
    done = run_program(tmp_path, program, options=["--target", target])
    logged = {"simulated:a100": "NVIDIA A100-SXM4-40GB True"}
    expected = [logged.get(target, "NVML Shared Library Not Found"), "True"]
    assert done.stdout.splitlines() == expected, done.stderr


_KERNELS = """
class CPU:
    name = "cpu"

class CUDA:
    name = "cuda"

def _backend():
    import torch

    return CPU() if torch.version.cuda is None else CUDA()
"""


@pytest.mark.parametrize("target", ["cpu", "simulated:a100"])
def test_kernels_of_the_hub_are_builds_for_the_target(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library chooses a build by this function, which takes CUDA from the scope.
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "backends.py").write_text(_KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("kernels", "kernels.backends"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with torchdevice.portable(target=target):
        from kernels import backends

        assert torch.version.cuda is not None
        assert backends._backend().name == "cpu"
    # A build for CUDA shows its version outside scopes, GPU or not.
    assert (backends._backend().name == "cuda") is (torch.version.cuda is not None)
    for name in ("kernels", "kernels.backends"):
        sys.modules.pop(name, None)
