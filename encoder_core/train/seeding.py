"""Randomness on the device as a function of the step.

Every draw (dropout, generator sampling) is seeded from (seed, step, microbatch), never from the rank, so the same
global batch draws the same numbers on any number of ranks.
"""

import hashlib

import torch

from encoder_core.optim.updates import WHOLE


def draw_seed(seed: int, step: int, microbatch: int, turn: str = WHOLE) -> int:
    """A 63-bit seed, hashed so that neighbouring steps, turns and runs share nothing."""
    place = f"{seed}/{step}/{microbatch}" + ("" if turn == WHOLE else f"/{turn}")
    digest = hashlib.blake2b(place.encode(), digest_size=8, person=b"maskfleet-draws")
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_draws(seed: int, step: int, microbatch: int, turn: str = WHOLE) -> None:
    """Seed the default generators of the CPU and of every GPU for one logical microbatch in one turn of its step."""
    torch.manual_seed(draw_seed(seed, step, microbatch, turn))
