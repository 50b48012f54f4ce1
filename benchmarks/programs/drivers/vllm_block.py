"""A Llama block of vLLM's layers, and its sampler, randomly weighted: ``vllm_block.py [cpu]``."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from package_modules import imported
from torch import nn
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

VOCABULARY, WIDTH, HEADS = 96, 64, 4


class Block(nn.Module):
    """Attention and a network of two layers, after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(3))
        self.qkv = QKVParallelLinear(WIDTH, WIDTH // HEADS, HEADS, bias=False)
        self.rope = get_rope(
            WIDTH // HEADS, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
        self.out = RowParallelLinear(WIDTH, WIDTH, bias=False)
        self.gate_up = MergedColumnParallelLinear(WIDTH, [128, 128], bias=False)
        self.silu = SiluAndMul()
        self.down = RowParallelLinear(128, WIDTH, bias=False)
        self.head = ParallelLMHead(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        residual = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](residual))[0].chunk(3, dim=-1)
        q, k = self.rope(
            torch.arange(len(tokens), device=tokens.device), q.contiguous(), k.contiguous()
        )
        heads = (each.reshape(len(tokens), HEADS, -1).transpose(0, 1) for each in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden, residual = self.norms[1](self.out(mixed.transpose(0, 1).flatten(1))[0], residual)
        hidden, _ = self.norms[2](self.down(self.silu(self.gate_up(hidden)[0]))[0], residual)
        return hidden


def sampling(device: str, requests: int) -> SamplingMetadata:
    """Greedy sampling of some words, with two logprobs."""
    each = torch.zeros(requests, device=device)
    odd = torch.arange(VOCABULARY, device=device) % 2 == 1
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=2,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=each,
        presence_penalties=each,
        repetition_penalties=each,
        output_token_ids=[[]] * requests,
        allowed_token_ids_mask=odd.expand(requests, -1),
        bad_words_token_ids={0: [[2], [4]]},
        logitsprocs=LogitsProcessors(),
    )


def cold(greedy: SamplingMetadata, device: str) -> SamplingMetadata:
    """The same by draws of a generator for each request, at a temperature of almost zero."""
    temperature = torch.full_like(greedy.frequency_penalties, 1e-4)
    generators = {
        request: torch.Generator(device).manual_seed(request) for request in range(len(temperature))
    }
    changes = {"temperature": temperature, "generators": generators}
    return replace(greedy, all_greedy=False, all_random=True, max_num_logprobs=None, **changes)


def main() -> None:
    device = sys.argv[1] if sys.argv[1:] else "cuda"
    # Without vLLM's kernels it computes by torch.
    config = VllmConfig(
        device_config=DeviceConfig(device),
        compilation_config=CompilationConfig(custom_ops=["none"]),
    )
    with set_current_vllm_config(config), torch.inference_mode():
        backend = "gloo" if device == "cpu" else "nccl"
        init_distributed_environment(1, 0, Path("rendezvous").absolute().as_uri(), 0, backend)
        initialize_model_parallel(backend=backend)
        torch.manual_seed(0)
        block = Block()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.2)
        block.to(device)
        tokens = torch.tensor([7, 1, 30, 2, 9, 64, 11], device=device)
        logits = LogitsProcessor(VOCABULARY)(block.head, block(tokens))
        greedy = sampling(device, len(tokens))
        sampled = Sampler()(logits.clone(), greedy)
        drawn = Sampler()(logits, cold(greedy, device))
    words = sampled.sampled_token_ids.flatten().tolist()
    # So cold, a draw is the likeliest word.
    assert drawn.sampled_token_ids.flatten().tolist() == words
    print(
        f"block: {words} {sampled.logprobs_tensors.logprobs.sum().item():.4f}; {imported('vllm')}"
    )


if __name__ == "__main__":
    main()
