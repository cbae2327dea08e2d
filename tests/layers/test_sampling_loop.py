"""The loop of docs/coming_from_offload.md: a trainer and a discarded sampler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from speedtorch.layers import TrainingState

TOKENS, WIDTH = 31, 16


class Llama(nn.Module):
    """A language model whose head is tied to its embedding, and a buffer that no state_dict has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40, bias=False), nn.Linear(40, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        positions = torch.arange(14.0)
        mixing = torch.exp(positions - positions[:, None]).tril()  # of a token and those before
        self.register_buffer("mixing", mixing, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        count = ids.shape[1]
        mixed = self.norm(self.mixing[:count, :count] @ x)
        return self.head(x + self.down(functional.silu(self.up(mixed))))

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
