"""Fine-tune a small GPT-2 on a text file with the HuggingFace Trainer, and generate text with it.

python finetune_gpt2.py [--steps 150] [--output runs/gpt2]
"""

import argparse
import math
import os
import re

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

HERE = os.path.dirname(os.path.abspath(__file__))


class WordTokenizer:
    """One token per word or punctuation mark of a text; the last token marks the end of a text."""

    def __init__(self, text):
        self.words = sorted(set(self.split(text)))
        self.ids = {word: index for index, word in enumerate(self.words)}
        self.eos_token_id = len(self.words)
        self.vocab_size = len(self.words) + 1

    @staticmethod
    def split(text):
        return re.findall(r"\w+|[^\w\s]", text)

    def encode(self, text):
        return [self.ids[word] for word in self.split(text)]

    def decode(self, ids):
        text = " ".join(self.words[i] for i in ids if i < self.eos_token_id)
        return re.sub(r" ([.,;:!?])", r"\1", text)


class Blocks(Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - self.length) // 8

    def __getitem__(self, index):
        block = self.ids[8 * index : 8 * index + self.length]
        return {"input_ids": block, "labels": block}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=os.path.join(HERE, "data", "harbour.txt"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", default="runs/gpt2")
    args = parser.parse_args()

    assert torch.cuda.is_available(), "this script needs a GPU"
    print(f"GPU: {torch.cuda.get_device_name(0)}, capability {torch.cuda.get_device_capability(0)}")

    set_seed(0)
    torch.set_num_threads(1)  # the model is too small to be shared between cores
    with open(args.text, encoding="utf-8") as file:
        text = file.read()
    tokenizer = WordTokenizer(text)
    ids = torch.tensor(tokenizer.encode(text))

    config = GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_positions=128,
        n_embd=96,
        n_layer=3,
        n_head=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config).cuda()
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens")

    training = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=10,
        fp16=True,
        logging_steps=max(1, args.steps // 5),
        save_steps=args.steps,
        dataloader_pin_memory=True,
        report_to=[],
        disable_tqdm=True,
    )
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    trainer = Trainer(model=model, args=training, train_dataset=Blocks(ids, 64))
    result = trainer.train()
    end.record()
    torch.cuda.synchronize()
    assert math.isfinite(result.training_loss)
    print(f"trained in {start.elapsed_time(end) / 1000:.1f} s, loss {result.training_loss:.3f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")

    model.eval()
    prompt = torch.tensor([tokenizer.encode("The harbour")], device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        written = model.generate(
            prompt, max_new_tokens=30, do_sample=True, top_k=5, pad_token_id=tokenizer.eos_token_id
        )
    print("wrote:", repr(tokenizer.decode(written[0].tolist())))


if __name__ == "__main__":
    main()
