"""word2vec: skip-gram with negative sampling on the text of Python's documentation.

Two tables with one row per word are in host memory. --file reads a text file (UTF-8) instead.

    python word2vec.py
    python word2vec.py --plain  # the same numbers in plain torch
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW, NEGATIVES = 4, 8


def words_of(path: Path | None) -> list[str]:
    """Returns the words of a file, or of Python's documentation, in order."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    else:
        text = path.read_text(encoding="utf-8")
    return re.findall(r"[a-z]+", text.lower())


class SkipGram(nn.Module):
    """Skip-gram with negative sampling."""

    def __init__(self, words: int, columns: int, plain: bool) -> None:
        super().__init__()
        kind = nn.Embedding if plain else speedtorch.Embedding
        self.centres, self.contexts = (
            kind(words, columns, sparse=True, device=DEVICE) for _ in range(2)
        )
        generator = torch.Generator().manual_seed(0)
        first = (torch.rand(words, columns, generator=generator) - 0.5) / columns
        self.centres.load_state_dict({"weight": first})
        self.contexts.load_state_dict({"weight": torch.zeros(words, columns)})

    def forward(self, centres: Tensor, contexts: Tensor) -> Tensor:
        """Maps centres `[n]` and contexts `[n, 1 + NEGATIVES]`, the true one first, to the loss."""
        scores = torch.einsum("nc,nkc->nk", self.centres(centres), self.contexts(contexts))
        return -F.logsigmoid(scores[:, 0]).mean() - F.logsigmoid(-scores[:, 1:]).sum(1).mean()


def batches(
    text: Tensor, weights: Tensor, size: int, random: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Returns an epoch of word pairs with negatives, drawn in proportion to `weights`."""
    pairs = [(text[:-d], text[d:]) for d in range(1, WINDOW + 1)]
    centres = torch.cat([words for pair in pairs for words in pair])
    contexts = torch.cat([words for left, right in pairs for words in (right, left)])
    order = torch.randperm(len(centres), generator=random)
    wrong = torch.multinomial(weights, len(order) * NEGATIVES, replacement=True, generator=random)
    candidates = torch.cat([contexts[order, None], wrong.view(-1, NEGATIVES)], 1)
    return list(zip(centres[order].split(size), candidates.split(size), strict=True))


@torch.no_grad()
def neighbours(model: SkipGram, word: int, most: int = 5) -> Tensor:
    """Returns the numbers of the words with the most similar rows (cosine)."""
    rows = F.normalize(model.centres.weight.cpu())
    return (rows @ rows[word]).topk(most + 1).indices[1:]


def main(arguments: list[str] | None = None) -> tuple[list[float], Tensor]:
    """Trains and prints neighbours; returns each epoch's loss and the centres' rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="text; by default Python's documentation")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--words", type=int, default=100_000, help="words of the text to use")
    parser.add_argument("--plain", action="store_true", help="use torch.nn.Embedding")
    chosen = parser.parse_args(arguments)
    words = words_of(chosen.file)[: chosen.words]
    counts = Counter(words)
    names = [name for name, count in counts.most_common() if count > 3]
    numbers = {name: number for number, name in enumerate(names)}
    text = torch.tensor([numbers[word] for word in words if word in numbers])
    weights = torch.tensor([counts[name] for name in names]).float() ** 0.75
    model = SkipGram(len(names), chosen.columns, chosen.plain)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=2e-3)
    if not chosen.plain:
        speedtorch.attach(optimizer, model)
    random, losses = torch.Generator().manual_seed(0), []
    for epoch in range(chosen.epochs):
        loader, total = batches(text, weights, 4096, random), 0.0
        steps = len(loader)
        if not chosen.plain:
            loader = speedtorch.prefetch(
                loader, model, ids=lambda batch: {model.centres: batch[0], model.contexts: batch[1]}
            )
        for centres, contexts in loader:
            loss = model(centres.to(DEVICE), contexts.to(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / steps)
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    for word in ("class", "list", "int"):
        if word in numbers:
            near = neighbours(model, numbers[word]).tolist()
            print(f"{word}: {', '.join(names[number] for number in near)}")
    return losses, model.centres.weight.detach().cpu()


if __name__ == "__main__":
    main()
