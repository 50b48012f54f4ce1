"""A CUDA script that trains a tiny GPT-2 by Hugging Face's Trainer, alone or with torchrun."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

folder, batch = Path(sys.argv[1]), int(sys.argv[2])


class Tokens(Dataset):
    def __init__(self, count=32, length=12, vocabulary=40):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


set_seed(0)
config = GPT2Config(
    vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
arguments = TrainingArguments(
    output_dir=str(folder / "run"),
    per_device_train_batch_size=batch,
    per_device_eval_batch_size=batch,
    learning_rate=1e-2,
    max_steps=4,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
assert arguments.n_gpu == 1, arguments.n_gpu
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens(16)
)
trainer.train()
assert next(trainer.model.parameters()).device == torch.device(arguments.device)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
(folder / f"losses-{arguments.process_index}").write_text(json.dumps(losses + evaluated))
