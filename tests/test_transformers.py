"""HuggingFace programs: architectures, Trainer, pipeline, accelerate, PEFT, Lightning."""

from __future__ import annotations

import collections
import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from processes import run_program
from sweeping import attention_on, identical, shuffled

import torchdevice

transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")

pytestmark = [pytest.mark.filterwarnings("ignore")]

transformers.logging.set_verbosity_error()


def gpt2(dropout: float = 0.1) -> Any:
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=99,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return transformers.GPT2LMHeadModel(config)


class Sequences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(10) + index) % 99
        return {"input_ids": ids, "labels": ids}


# ---- architectures -------------------------------------------------------------------------------


def exercise(tiny: tiny_models.TinyModel, device: str | None, randomly: bool = True) -> Any:
    """Forward, backward, optimizer step, forward, perhaps generation; with dropout."""
    model, inputs = tiny.model, {name: value.clone() for name, value in tiny.inputs.items()}
    if device is not None:
        model, inputs = model.to(device), {name: value.cuda() for name, value in inputs.items()}
    transformers.set_seed(3)  # NumPy's too: speech models draw their masks from it
    model.train(randomly)
    output = model(**inputs)
    loss = output.loss if output.get("loss") is not None else output[0].float().mean()
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(**inputs)[0]
    generated = None
    if tiny.generates:
        start = inputs["input_ids"] if "input_ids" in inputs else inputs["input_features"]
        generated = model.generate(start, max_new_tokens=4, do_sample=randomly)
    return loss.detach(), logits, generated


SAMPLE = {"causal": 10, "masked": 4, "seq2seq": 3, "vision": 2, "audio": 2}
"""Family -> the number of architectures in a sample."""

MINIMUM = {"causal": 40, "masked": 10, "seq2seq": 5, "vision": 5, "audio": 3}
"""Family -> the number of architectures that a complete sweep must reach."""


NOT_GENERATING_ON_MPS = {"rwkv"}
"""Architectures whose ``generate`` fails on MPS: transformers asks their cache, a list,
``is_croppable`` there only.
"""


def test_architectures_are_identical_to_the_cpu(
    target: str, kind: str, sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]
) -> None:
    names = tiny_models.all_names()
    found = {family: [n for f, n in names if f == family] for family in MINIMUM}
    chosen = [(f, n) for f in MINIMUM for n in shuffled(found[f], sweep)]
    compared: collections.Counter[str] = collections.Counter()
    generated, differences, unbuilt, without_dropout = 0, [], [], []
    for family, name in chosen:
        if not sweep[0] and compared[family] >= SAMPLE[family]:
            continue
        try:
            tiny = tiny_models.build(family, name)
            tiny.generates &= not (kind == "mps" and name in NOT_GENERATING_ON_MPS)
            plain = copy.deepcopy(tiny)
            with attention_on(target):
                expected = exercise(plain, None)
        except Exception as error:
            # Does not build tiny, or does not run on the plain CPU: nothing to compare with.
            unbuilt.append(
                f"{family} {name}: {type(error).__name__}: {str(error).splitlines()[:1]}"[:150]
            )
            continue
        again = copy.deepcopy(tiny)
        try:
            with torchdevice.portable(target):
                difference = identical(expected, exercise(tiny, "cuda"), kind)
        except Exception as error:
            differences.append(f"{family} {name}: {type(error).__name__}: {error}")
            continue
        if difference and kind != "cpu":
            # The model draws from two generators: for dropout from the device's, for everything
            # else from the CPU's.
            without_dropout.append(name)
            with attention_on(target):
                expected = exercise(copy.deepcopy(again), None, randomly=False)
            with torchdevice.portable(target):
                difference = identical(expected, exercise(again, "cuda", randomly=False), kind)
        compared[family] += 1
        generated += expected[2] is not None
        if difference:
            differences.append(f"{family} {name}: {difference}")
    with capsys.disabled():
        print(
            f"\ntransformers on {target}: {compared.total()} architectures compared "
            f"{dict(compared)}, "
            f"{generated} generate;"
        )
        print(
            f"  {len(names)} are in the mappings, {len(unbuilt)} of those tried do not run tiny on "
            "the plain CPU:"
        )
        for line in unbuilt:
            print(f"  nothing to compare: {line}")
        if without_dropout:
            print(
                "  compared without dropout and sampling, for drawing from two generators: "
                f"{' '.join(without_dropout)}"
            )
        for line in differences:
            print(f"  differs: {line}")
    assert differences == []
    assert all(
        compared[family] >= least for family, least in (MINIMUM if sweep[0] else SAMPLE).items()
    )


# ---- Trainer -------------------------------------------------------------------------------------


def train(folder: Path, resume: str | None = None, dropout: float = 0.1, **options: Any) -> Any:
    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(gpt2(dropout), arguments, train_dataset=Sequences())
    output = trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    return trainer, output


class TestTrainer:
    OPTIONS: dict[str, dict[str, Any]] = {
        "float32": {},
        "fp16": {"fp16": True},
        "bf16": {"bf16": True},
        "fused": {"optim": "adamw_torch_fused"},
        "workers": {"dataloader_num_workers": 2},
        "checkpointing": {"gradient_checkpointing": True},
        "full bf16 evaluation": {"bf16_full_eval": True},
    }

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    def test_trains_and_resumes_to_the_same_weights(
        self, target: str, options: dict[str, Any], tmp_path: Path
    ) -> None:
        with torchdevice.portable(target):
            trainer, output = train(tmp_path, **options)
            resumed, _ = train(tmp_path, "checkpoint-2", **options)
            assert torch.isfinite(torch.tensor(output.training_loss))
            weights = zip(
                trainer.model.state_dict().values(),
                resumed.model.state_dict().values(),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in weights)

    def test_float32_gives_the_numbers_of_the_plain_cpu(
        self, target: str, kind: str, tmp_path: Path
    ) -> None:
        # On a device with a generator, dropout does not draw from the one that orders samples.
        dropout = 0.1 if kind == "cpu" else 0.0
        with attention_on(target):
            plain, _ = train(tmp_path / "plain", use_cpu=True, dropout=dropout)
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        with torchdevice.portable(target):
            ours, _ = train(tmp_path / "ours", dropout=dropout)
            expected, actual = (
                list(trainer.model.state_dict().values()) for trainer in (plain, ours)
            )
            assert identical(expected, actual, kind) == ""

    def test_mixed_precision_is_really_on(self, target: str, tmp_path: Path) -> None:
        with torchdevice.portable(target):
            trainer, _ = train(tmp_path, fp16=True)
            assert trainer.accelerator.native_amp and trainer.accelerator.scaler.is_enabled()

    def test_tf32_argument_passes(self, tmp_path: Path) -> None:
        """In a process of its own, because transformers sets TF32 for the whole process."""
        program = (
            f"import transformers; print(transformers.TrainingArguments({str(tmp_path)!r}, "
            "tf32=True).tf32)"
        )
        result = run_program(tmp_path, program)
        assert result.stdout.strip() == "True", result.stderr


# ---- inference -----------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:99]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="!", eos_token="!"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_pipeline(target: str, device: Any) -> None:
    with torchdevice.portable(target):
        torch.manual_seed(0)
        generate = transformers.pipeline(
            "text-generation", model=gpt2().eval(), tokenizer=tokenizer(), device=device
        )
        (result,) = generate("ab", max_new_tokens=3)
        assert result["generated_text"].startswith("ab")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "device_map", ["cuda", "cuda:0", "auto", {"": 0}, {"": "cuda:0"}, 0], ids=str
)
def test_device_map(target: str, device_map: Any, tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    with torchdevice.portable(target):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map=device_map, dtype=torch.bfloat16
        )
        ids = torch.arange(5, device="cuda")[None]
        assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 7)
        assert loaded.dtype is torch.bfloat16


def test_streaming_from_a_thread(target: str) -> None:
    class Numbers:
        def decode(self, ids: Any, **options: Any) -> str:
            return " ".join(map(str, ids)) + " "

    with torchdevice.portable(target):
        model = gpt2().eval().cuda()
        streamer = transformers.TextIteratorStreamer(Numbers())
        ids = torch.arange(5, device="cuda")[None]
        thread = threading.Thread(
            target=model.generate,
            kwargs={
                "input_ids": ids,
                "streamer": streamer,
                "max_new_tokens": 5,
                "min_new_tokens": 5,
            },
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text.split()[:5] == ["0", "1", "2", "3", "4"] and len(text.split()) == 10


# ---- accelerate, PEFT, Lightning -----------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_accelerate(target: str, precision: str) -> None:
    from accelerate import Accelerator

    with torchdevice.portable(target):
        torch.manual_seed(0)
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(Sequences(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        assert losses[-1] < losses[0]
        assert (accelerator.scaler is not None) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerates_device_is_that_of_its_tensors(target: str, kind: str, precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    with torchdevice.portable(target):
        accelerator = Accelerator(mixed_precision=precision)
        (weight, _) = accelerator.prepare(torch.nn.Linear(2, 2)).parameters()
        again = pickle.loads(pickle.dumps(accelerator))
        states = [accelerator, accelerator.state, PartialState(), again, again.state]
        assert {state.device.type for state in states} == {weight.device.type}
        # accelerate takes MPS before CUDA where a Mac has it, and names it without an index.
        assert {state.device for state in states} == {
            torch.device("mps" if kind == "mps" else "cuda")
        }
        assert weight.device.type == torch.ones(1, device=again.device).device.type
        assert not hasattr(AcceleratorState, "device") and not hasattr(PartialState, "device")
        del states[2].device
        with pytest.raises(
            AttributeError, match=r"This happens if `PartialState\._reset_state\(\)` was called"
        ):
            _ = states[2].device
    assert not hasattr(AcceleratorState, "device") and not hasattr(PartialState, "device")


def test_accelerate_on_the_cpu_stays_there(target: str) -> None:
    from accelerate import Accelerator

    with torchdevice.portable(target):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        (weight, _) = accelerator.prepare(torch.nn.Linear(2, 2)).parameters()
        assert weight.device.type == accelerator.device.type == "cpu"
        with accelerator.autocast():
            assert (weight @ weight).dtype is torch.bfloat16


def test_peft_lora_step(target: str) -> None:
    peft = pytest.importorskip("peft", reason="install with the [test] extra")
    with torchdevice.portable(target):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(gpt2(), config).cuda()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        ids = torch.arange(10, device="cuda")[None]
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_lightnings_device_is_that_of_its_tensors(target: str, kind: str) -> None:
    lightning = pytest.importorskip("lightning", reason="install with the [test] extra")
    with torchdevice.portable(target):
        fabric = lightning.Fabric(accelerator="gpu", devices=1)
        module = fabric.setup(torch.nn.Linear(2, 2))
        assert fabric.device.type == module.device.type == module.weight.device.type == kind


@pytest.mark.sampled(4)
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_lightning(target: str, accelerator: str, precision: str) -> None:
    lightning = pytest.importorskip("lightning", reason="install with the [test] extra")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with torchdevice.portable(target):
        data = torch.utils.data.TensorDataset(torch.randn(12, 4))
        module = Module()
        before = module.layer.weight.detach().clone()
        trainer = lightning.Trainer(
            accelerator=accelerator,
            devices=1,
            max_steps=3,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        assert trainer.global_step == 3 and not torch.equal(before, module.layer.weight.cpu())
