"""Flags of a replay row: four bits packed into one byte."""

import torch
from torch import Tensor

from pql.types import Step

TERMINATED, TRUNCATED, NEXT_FIRST, VALID = 1, 2, 4, 8
ENDS = TERMINATED | TRUNCATED
OLDER_FINAL_OK = 16  # in rings of release 0.2, which had every bit

RULES = {
    "valid": lambda f: bool(f & VALID),
    "alive": lambda f: float(not f & TERMINATED),  # the return continues beyond this row
    "final lost": lambda f: f & (ENDS | NEXT_FIRST) == TRUNCATED | NEXT_FIRST,  # cut off, without a final observation
    "announced": lambda f: f & (ENDS | NEXT_FIRST) != NEXT_FIRST,  # no unannounced restart follows
    "goes on": lambda f: not f & (ENDS | NEXT_FIRST),
    "same episode": lambda f: not f & NEXT_FIRST,  # the next row's observation is the successor
}
"""Meanings of a row's packed flags; a ring holds them as tables on its device."""


def tables(device: torch.device) -> dict[str, Tensor]:
    """Return ``RULES`` as [16] tensors: a look-up is one kernel instead of a chain of bit tests."""
    return {k: torch.tensor([rule(f) for f in range(16)], device=device) for k, rule in RULES.items()}


def pack_flags(step: Step, followed: Tensor | None = None) -> Tensor:
    """Pack a step's flags: uint8 [n].

    Args:
        followed: [n] bool; the next row will hold the final observation, although ``step.obs`` begins an episode.
    """
    over = step.first | ~step.final_ok
    over = over if followed is None else over & ~followed
    ends = step.terminated * TERMINATED + step.truncated * TRUNCATED + over * NEXT_FIRST
    return (ends + step.valid * VALID).to(torch.uint8)
