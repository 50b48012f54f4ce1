"""``torchdevice plan --try`` and ``--change``: what would make a program fit."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command, run_python

from torchdevice.plan import change_words, changes, eight_bits, sweeping
from torchdevice.plan.change_words import Change

pytestmark = pytest.mark.one_engine

ACCELERATED = """
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=2000)
accelerator = Accelerator()
model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.ones(4, 256, dtype=torch.long, device=accelerator.device)
for _ in range(2):
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=2000)
rows = [{"input_ids": torch.ones(256, dtype=torch.long), "labels": torch.ones(256, dtype=torch.long)}] * 64
args = TrainingArguments("out", max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no")
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows).train()
"""

PLAIN = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 64, device="cuda")).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "names", "ranks", "title"),
    [
        ("lora", ("lora",), None, "LoRA of rank 16"),
        ("fsdp:4", ("fsdp",), 4, "FSDP over 4 ranks"),
        (
            "checkpointing+8-bit",
            ("checkpointing", "8-bit"),
            None,
            "gradient checkpointing and AdamW with states of 8 bits",
        ),
    ],
)
def test_what_a_change_says(
    text: str, names: tuple[str, ...], ranks: int | None, title: str
) -> None:
    found = Change.parsed(text)
    assert found == Change(names, ranks) and found.title == title and str(found) == text


@pytest.mark.parametrize("text", ["", "loar", "fsdp", "fsdp:1", "fsdp:x", "lora:4", "lora+"])
def test_what_is_no_change(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"is not a change. Use checkpointing, 8-bit, lora, qlora, fsdp:4, or several",
    ):
        Change.parsed(text)


def test_what_is_tried() -> None:
    texts = [str(each) for each in change_words.tried(None)]
    assert texts[0] == "" and {"checkpointing+lora", "fsdp:2", "fsdp:8"} < set(texts)
    assert [str(each) for each in change_words.tried(16) if each.ranks] == ["fsdp:16"]
    assert [str(each) for each in change_words.tried_on_model("lora", None, None)] == [
        "",
        "checkpointing",
        "qlora",
        "fsdp:2",
        "fsdp:4",
        "fsdp:8",
    ]
    of_ranks = change_words.tried_on_model("lora", 16, None)
    assert [str(each) for each in of_ranks] == ["", "checkpointing", "qlora", "fsdp:16"]
    assert [*map(str, change_words.tried_on_model("qlora", 16, None))] == [""]
    assert [*map(str, change_words.tried_on_model("lora", 16, "fsdp"))] == ["", "checkpointing"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("checkpointing+lora", ["llama", "--train", "lora", "--checkpointing"]),
        ("qlora", ["llama", "--train", "qlora"]),
        ("8-bit", ["llama", "--train", "full"]),
        ("fsdp:4", ["llama", "--train", "full", "--strategy", "fsdp"]),
    ],
)
def test_the_words_of_a_changed_model(change: str, expected: list[str]) -> None:
    assert (
        change_words.words_of_model(["llama", "--train", "full"], Change.parsed(change)) == expected
    )


def test_the_table_shows_what_could_not_be_tried() -> None:
    plan = {
        "finished": True,
        "needs": 3 << 30,
        "smallest": "t4",
        "fits": [{"model": "t4", "fits": "yes"}],
        "devices": [{}],
        "other processes": [],
    }
    plans: list[dict[str, Any]] = [
        {**plan, "change": ""},
        {**plan, "change": "lora", "not changed": ["lora"]},
    ]
    head, whole, untried = sweeping.tables_of_changes(plans, "t4")
    assert head[-1] == "fits t4" and whole == ("as it is", f"{'3.00 GiB':>11}", "t4", "yes")
    assert (
        untried[0] == "LoRA of rank 16"
        and untried[2].startswith("not tried: the program")
        and untried[3] == ""
    )
    ended = {"finished": False, "at least": 0, "ended": "KeyError at t.py:1"}
    failed = {**plans[1], **ended, "devices": []}
    _, row = sweeping.tables_of_changes([failed], None)
    assert row == ("LoRA of rank 16", "", "not finished: KeyError at t.py:1"), "this comes first"


@pytest.mark.parametrize(
    ("size", "expected"), [(4096, 2 * (4096 + 16 * 4)), (4097, 2 * (4097 + 17 * 4)), (100, 800)]
)
def test_the_states_of_eight_bits(size: int, expected: int) -> None:
    found = eight_bits.states_of(torch.nn.Parameter(torch.ones(size)))
    assert sum(each.nbytes for name, each in found.items() if name != "step") == expected


def changed_adam(parameters: list[torch.nn.Parameter], changed: changes.Changed) -> Any:
    """Return AdamW of the change's states."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    assert eight_bits.shrink(optimizer, changed.whole)
    return optimizer


def dtype_of_state(parameter: torch.nn.Parameter, changed: changes.Changed) -> torch.dtype:
    """Return the dtype of a parameter's state after a step."""
    parameter.grad = torch.zeros_like(parameter)
    optimizer = changed_adam([parameter], changed)
    optimizer.step()
    dtype: torch.dtype = optimizer.state[parameter]["state1"].dtype
    return dtype


def test_the_states_of_an_embedding_stay_whole() -> None:
    changed = changes.Changed(Change.parsed("8-bit"))
    embedding, linear = torch.nn.Embedding(100, 100), torch.nn.Linear(100, 100)
    changed.model(torch.nn.Sequential(embedding, linear))
    assert dtype_of_state(embedding.weight, changed) is torch.float32
    assert dtype_of_state(linear.weight, changed) is torch.uint8
    # Another plan in this process knows nothing of the embedding.
    other = changes.Changed(Change.parsed("8-bit"))
    assert dtype_of_state(embedding.weight, other) is torch.uint8


def test_a_parameter_in_the_place_of_a_freed_one_is_another() -> None:
    changed = changes.Changed(Change.parsed("8-bit"))
    for _ in range(50):
        changed.model(torch.nn.Embedding(50, 100))
        assert dtype_of_state(torch.nn.Parameter(torch.ones(5000)), changed) is torch.uint8


def test_an_optimizer_of_eight_bits_steps() -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = changed_adam([*model.parameters()], changes.Changed(Change.parsed("8-bit")))
    assert isinstance(optimizer, torch.optim.AdamW) and not optimizer.state
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert {len(state) for state in optimizer.state.values()} == {3, 5}


def test_an_optimizer_with_a_step_of_its_own_is_not_changed() -> None:
    class Own(torch.optim.AdamW):
        pass

    optimizer = Own([torch.nn.Parameter(torch.ones(1))])
    assert not eight_bits.shrink(optimizer, ()) and type(optimizer) is Own


def test_a_change_belongs_to_one_context() -> None:
    program = """
        import torch, torchdevice
        from torchdevice.kernel import thread_state
        from torchdevice.plan import changes
        from torchdevice.plan.change_words import Change

        def kind():
            return type(torch.optim.Adam([torch.nn.Parameter(torch.ones(1, device="cuda"))])).__name__

        one, other = torchdevice.simulate("cuda"), torchdevice.simulate("cuda")
        with one:
            changed = changes.install(thread_state.state.context, Change.parsed("8-bit"))
            print(kind(), changed.missing)
        with other:
            print(kind())
        with one:
            print(kind())
        print(type(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])).__name__)
    """
    done = run_python("-c", textwrap.dedent(program))
    assert done.stdout.split("\n") == ["EightBitAdam []", "Adam", "EightBitAdam", "Adam", ""], (
        done.stderr
    )


def test_an_optimizer_trains_only_what_is_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW([{"params": each.parameters()} for each in model])
    model[0].requires_grad_(False)
    changes._train_only(optimizer, model.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def planned(folder: Path, program: str, *words: str) -> dict[str, Any]:
    """Return the plan of a program."""
    (folder / "train.py").write_text(program)
    done = run_command("plan", "--json", *words, "train.py", cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["finished"], done.stderr
    return found


@pytest.mark.sampled(2, of="long programs")
@pytest.mark.parametrize("program", [ACCELERATED, TRAINED], ids=["accelerate", "Trainer"])
def test_each_change_is_made(tmp_path: Path, program: str) -> None:
    whole = planned(tmp_path, program)["devices"][0]
    shrunk = planned(tmp_path, program, "--change", "checkpointing+8-bit")
    assert (
        shrunk["not changed"] == []
        and shrunk["devices"][0]["optimizer state"] < 0.6 * whole["optimizer state"]
    )
    assert shrunk["devices"][0]["peak"] < whole["peak"]
    adapted = planned(tmp_path, program, "--change", "lora")
    assert (
        adapted["not changed"] == []
        and adapted["devices"][0]["optimizer state"] < 0.2 * whole["optimizer state"]
    )
    divided = planned(tmp_path, program, "--change", "fsdp:4")
    assert divided["not changed"] == []
    assert 0.2 < divided["devices"][0]["optimizer state"] / whole["optimizer state"] < 0.3


def test_a_program_without_a_place_for_a_change(tmp_path: Path) -> None:
    found = planned(tmp_path, PLAIN, "--change", "checkpointing+lora")
    assert found["change"] == "checkpointing+lora" and found["not changed"] == [
        "checkpointing",
        "lora",
    ]


@pytest.mark.sampled(2, of="long programs")
def test_what_makes_a_model_fit(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **sizes, "vocab_size": 2000})
    )
    words = ("--model", ".", "--train", "full", "--seq", "256", "--batch", "8", "--dtype", "fp32")
    done = run_command("plan", "--try", "--json", "--fits", "t4", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    needs = {each["change"]: each["needs"] for each in json.loads(done.stdout)["tried"]}
    assert [*needs] == [str(each) for each in change_words.tried_on_model("full", None, None)]
    assert needs[""] > needs["checkpointing"] > needs["checkpointing+8-bit"]
    assert needs["8-bit"] < needs[""] and needs["qlora"] < needs[""]
    states = {
        each["change"]: each["devices"][0]["optimizer state"]
        for each in json.loads(done.stdout)["tried"]
    }
    assert states["fsdp:8"] * 3 < states["fsdp:2"] < states[""] * 0.6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--try", "--sweep", "batch=1,2", "t.py"], "--try makes its own plans"),
        (["--try", "--change", "lora", "t.py"], "--try makes its own plans"),
        (["--try", "--model", "llama"], "Add --train full"),
        (["--change", "loar", "t.py"], "'loar' is not a change"),
        (["--try", "--fits", "t5", "t.py"], "is not the name of a GPU"),
        (["--change", "lora", "--model", "llama"], "--change is about training. Add --train full"),
    ],
)
def test_what_cannot_be_tried(words: list[str], said: str) -> None:
    done = run_command("plan", *words)
    assert done.returncode == 2 and said in done.stderr
