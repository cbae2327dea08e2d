"""Numbers that tell whether bytes on a device have changed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fingerprint"]

# Of Weyl's sequence, which splitmix64 takes; as a signed number of 64 bits.
_GOLDEN = -0x61C8864680B583EB
# Words that are mixed at once.
_CHUNK = 1 << 22


def fingerprint(values: Tensor) -> Tensor:
    """A number that other bytes have, too, with a probability of 2^-64 or so.

    It is the sum of all words, each mixed with its place as by splitmix64.
    """
    end = len(values) // 8 * 8
    words = values[:end].view(torch.int64)
    parts = [*torch.split(words, _CHUNK)] + ([values[end:].long()] if end < len(values) else [])
    # Not kept: these are as many bytes as the longest part.
    places = torch.arange(max(map(len, parts)), device=values.device) * _GOLDEN
    return torch.stack([_mixed(part, number, places) for number, part in enumerate(parts)]).sum()


def _mixed(words: Tensor, number: int, places: Tensor) -> Tensor:
    mixed = words + places[: len(words)]
    mixed += number * 0x632BE59BD9B4E019
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> 31
    return mixed.sum()
