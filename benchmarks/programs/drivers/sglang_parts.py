"""SGLang's rotary embedding, penalties and token allocator in torch: ``sglang_parts.py [cpu]``."""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from package_modules import imported


@dataclass
class Batch:
    """What SGLang's penalties read of a batch."""

    device: str
    reqs: list[SimpleNamespace]


def rotated(device: str) -> torch.Tensor:
    """Turn a query and a key of eight tokens."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    rope = RotaryEmbedding(16, 16, 64, 10000, True, torch.float32).to(device)
    query, key = torch.randn(2, 8, 64).to(device)
    return torch.cat(rope.forward_native(torch.arange(8, device=device), query, key))


def penalized(device: str) -> torch.Tensor:
    """Choose words for three requests, each of which makes itself less likely."""
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(frequency_penalty=0.9, presence_penalty=0.4)
    requests = [SimpleNamespace(sampling_params=parameters) for _ in range(3)]
    batch = Batch(device, requests)
    kinds = {penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedPresencePenalizer}
    penalties = penaltylib.BatchedPenalizerOrchestrator(12, batch, kinds)
    logits, words = torch.randn(3, 12).to(device), []
    for _ in range(6):
        left = logits.clone()
        penalties.apply(left)
        words.append(left.argmax(dim=-1))
        penalties.cumulate_output_tokens(words[-1])
    return torch.stack(words, dim=1)


def allocated(device: str) -> torch.Tensor:
    """Take four places, give two back and take four."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    allocator = TokenToKVPoolAllocator(6, torch.float16, device, kvcache=None, need_sort=True)
    allocator.free(allocator.alloc(4)[1:3])
    return torch.cat([allocator.alloc(2), allocator.alloc(2)])


def main() -> None:
    device = sys.argv[1] if sys.argv[1:] else "cuda"
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang reads it as it is imported
    torch.manual_seed(0)
    turned, words, places = rotated(device), penalized(device), allocated(device)
    values = turned.double()
    found = f"{values.square().sum():.4f} {values.sum():.4f}, {words.tolist()}, {places.tolist()}"
    print(f"parts: {found}; {imported('sglang')}")


if __name__ == "__main__":
    main()
