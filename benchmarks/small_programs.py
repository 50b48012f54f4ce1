"""Small-tensor programs like GPU code's tests: training, reinforcement learning, generation.

Each function takes the device that the program names, and returns the call to time. Needs the [hf]
extra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

_STEPS, _TOKENS = 32, 20


def _gpt2(device: str) -> Any:
    """Return a tiny GPT-2: 2 layers, 64 wide."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64, **tokens
    )
    return transformers.GPT2LMHeadModel(config).to(device)


def step_of_gpt2(device: str) -> Callable[[], Any]:
    """Train a tiny GPT-2, with dropout, on batches of 4 x 32 tokens."""
    model = _gpt2(device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (4, 32)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generate_by_transformers(device: str) -> Callable[[], Any]:
    """Write tokens by ``generate`` of transformers, with a cache."""
    model = _gpt2(device).eval()
    ids = torch.randint(3, 256, (1, 8)).to(device)
    length = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
    return lambda: model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length
    )


class _Block(nn.Module):
    """A layer of nanoGPT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).split(width, dim=2)
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in parts
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class _NanoGPT(nn.Module):
    def __init__(
        self, width: int = 64, heads: int = 4, layers: int = 2, tokens: int = 256, length: int = 64
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.blocks(self.tokens(ids) + self.places(places))
        return self.head(self.norm(x[:, [-1], :]))  # type: ignore[no-any-return]


def generate_as_nanogpt(device: str) -> Callable[[], Any]:
    """Draw tokens from the 20 likeliest, without a cache, as ``generate`` of nanoGPT does."""
    torch.manual_seed(0)
    model, start = _NanoGPT().eval().to(device), torch.randint(256, (1, 4)).to(device)

    @torch.no_grad()
    def generate() -> torch.Tensor:
        ids = start
        for _ in range(_TOKENS):
            logits = model(ids)[:, -1, :] / 0.8
            likeliest, _ = torch.topk(logits, 20)
            logits[logits < likeliest[:, [-1]]] = -float("inf")
            ids = torch.cat((ids, torch.multinomial(functional.softmax(logits, -1), 1)), 1)
        return ids

    return generate


class _Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden)[:, 0]


def ppo(device: str) -> Callable[[], Any]:
    """Train an agent like CleanRL's ``ppo.py``, in a world of a few lines."""
    torch.manual_seed(0)
    agent = _Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)

    def iterate() -> None:
        seen = torch.zeros(_STEPS, 8, device=device)
        actions = torch.zeros(_STEPS, dtype=torch.long, device=device)
        chances, rewards, values = (torch.zeros(_STEPS, device=device) for _ in range(3))
        world = torch.randn(8)
        for step in range(_STEPS):
            seen[step] = world.to(device)
            with torch.no_grad():
                choice, value = agent(seen[step : step + 1])
                action = choice.sample()
                chances[step], values[step] = choice.log_prob(action)[0], value[0]
            actions[step] = action[0]
            world = torch.roll(world, 1) * 0.9 + 0.1 * action.item()
            rewards[step] = float(world[0])
        advantages = _advantages(rewards, values)
        returns = advantages + values
        for _ in range(2):
            order = torch.randperm(_STEPS, device=device)
            for rows in order.split(16):
                batch = seen[rows], actions[rows], chances[rows], advantages[rows], returns[rows]
                _update(agent, optimizer, *batch)

    return iterate


def _advantages(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(rewards)
    last: Any = 0
    for step in reversed(range(len(rewards) - 1)):
        last = rewards[step] + 0.99 * values[step + 1] - values[step] + 0.95 * 0.99 * last
        found[step] = last
    return found


def _update(
    agent: _Agent,
    optimizer: torch.optim.Optimizer,
    seen: torch.Tensor,
    actions: torch.Tensor,
    chances: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
) -> None:
    choice, values = agent(seen)
    ratio = (choice.log_prob(actions) - chances).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    loss = 0.5 * functional.mse_loss(values, returns) - gain - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
