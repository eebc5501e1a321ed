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


class Packer:
    """Packs a step's flags by look-up in tables of their 32 combinations.

    Args:
        fillers: the ring inserts a filler row with the final observation where an episode ended and ``step.obs``
            begins the next one.
    """

    def __init__(self, fillers: bool, device: torch.device):
        rows = [[bool(code >> bit & 1) for bit in range(5)] for code in range(32)]
        followed = [fillers and (term or cut) and first and valid and ok for term, cut, first, valid, ok in rows]
        packed = [
            term * TERMINATED + cut * TRUNCATED + ((first or not ok) and not after) * NEXT_FIRST + valid * VALID
            for (term, cut, first, valid, ok), after in zip(rows, followed, strict=True)
        ]
        self._bits = torch.tensor([[1], [2], [4], [8], [16]], device=device)
        self._packed = torch.tensor(packed, dtype=torch.uint8, device=device)
        self._followed = torch.tensor(followed, dtype=torch.int64, device=device)

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the row's packed flags, uint8 [n], and the filler rows that follow it, int64 [n], 0 or 1."""
        flags = torch.stack((step.terminated, step.truncated, step.first, step.valid, step.final_ok))
        code = (flags * self._bits).sum(0)
        return self._packed.index_select(0, code), self._followed.index_select(0, code)
