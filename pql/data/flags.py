"""Flags of a replay row: five bits packed into one byte."""

import torch
from torch import Tensor

from pql.types import Step

TERMINATED, TRUNCATED, NEXT_FIRST, VALID, FINAL_OK = 1, 2, 4, 8, 16

RULES = {
    "valid": lambda f: bool(f & VALID),
    "alive": lambda f: float(not f & TERMINATED),  # the return continues beyond this row
    "cut": lambda f: bool(f & TRUNCATED and not f & TERMINATED),  # ... with the value of a final observation
    "final lost": lambda f: bool(f & TRUNCATED and not f & (TERMINATED | FINAL_OK)),
    "announced": lambda f: f & (TERMINATED | TRUNCATED | NEXT_FIRST) != NEXT_FIRST,  # no unannounced restart follows
    "goes on": lambda f: not f & (TERMINATED | TRUNCATED | NEXT_FIRST),
    "same episode": lambda f: not f & NEXT_FIRST,  # the next row's observation belongs to it; a lost life ends none
}
"""Meanings of a row's packed flags; a ring holds them as tables on its device."""


def tables(device: torch.device) -> dict[str, Tensor]:
    """Return ``RULES`` as [32] tensors: a look-up is one kernel instead of a chain of bit tests."""
    return {k: torch.tensor([rule(f) for f in range(32)], device=device) for k, rule in RULES.items()}


def pack_flags(step: Step) -> Tensor:
    """Pack a step's flags: uint8 [n]."""
    ends = step.terminated * TERMINATED + step.truncated * TRUNCATED + step.first * NEXT_FIRST
    return (ends + step.valid * VALID + step.final_ok * FINAL_OK).to(torch.uint8)
