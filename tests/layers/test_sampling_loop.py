"""The loop of docs/coming_from_offload.md: a trainer and a discarded sampler of two Llamas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from speedtorch.layers import TrainingState

TOKENS, WIDTH, HEADS = 31, 16, 2


class Attention(nn.Module):
    """Causal attention with rotary positions, whose frequencies no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        half = WIDTH // HEADS // 2
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.inv_freq)
        angles = torch.cat([angles, angles], -1)

        def turned(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, -1)
            return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.into(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 40, bias=False) for _ in range(2))
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids))))

    @torch.no_grad()
    def generate(self, ids: Tensor) -> Tensor:
        """The ids and 8 more, each the most likely."""
        for _ in range(8):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def prompts(step: int, device: str) -> Tensor:
    random = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (3, 6), generator=random).to(device)


def train(policy: Llama, optimizer: optim.Optimizer, ids: Tensor) -> None:
    logits = policy(ids[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()


def test_tokens_of_a_discarded_sampler_are_those_of_the_trainer(device: str) -> None:
    plain = Llama(0).to(device)
    plain_optimizer = optim.AdamW(plain.parameters(), lr=0.02)
    policy, engine = Llama(0).to(device), Llama(1).to(device)
    optimizer = optim.AdamW(policy.parameters(), lr=0.02)
    trainer, generator = TrainingState(policy, optimizer), TrainingState(engine)
    generator.sleep()
    for step in range(5):
        expected = plain.generate(prompts(step, device))
        plain_optimizer.zero_grad()
        train(plain, plain_optimizer, expected)

        optimizer.zero_grad()
        trainer.sleep(["optimizer"])
        generator.wake()
        if step:
            with pytest.raises(RuntimeError, match="embedding.weight, .* discarded by sleep"):
                engine.generate(prompts(step, device))
        engine.load_state_dict(policy.state_dict())
        with trainer.asleep(["weights"]):
            found = engine.generate(prompts(step, device))
        generator.sleep(discard=["weights"])
        trainer.wake()
        train(policy, optimizer, found)
        assert torch.equal(found, expected), step
    assert all(map(torch.equal, policy.parameters(), plain.parameters()))
