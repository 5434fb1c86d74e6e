"""Random numbers that belong to a sample: they depend on its seed and a purpose, never on the batch around it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any number of integers and words; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded with :func:`derive_seed`; CPU, so that a GPU run draws the same numbers."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def normal(seeds: Sequence[int], shape: Sequence[int], *purpose: int | str) -> Tensor:
    """(B, *shape) float32 standard normal noise on the CPU: row i depends on ``seeds[i]`` and ``purpose`` alone."""
    return torch.stack([torch.randn(*shape, generator=generator(seed, *purpose)) for seed in seeds])
