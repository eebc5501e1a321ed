"""Store: what a collector writes rows to. Replays and rollouts are stores."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.types import Memory, Obs, Step


class Store:
    """Destination of rows. The optional methods do nothing here.

    Attributes:
        ragged: columns may advance independently. ``insert`` then takes a fourth argument: the columns that have
            answered, [n] bool.
    """

    device: torch.device
    ragged = False

    def begin(self, obs: Obs) -> None:
        """Set the first observation [N, ...] that the run acts on."""

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """Begin a tick at this observation, with the policy's memory (None: it has none)."""

    def restart(self, obs: Obs) -> None:
        """Continue from ``obs`` [N, ...] in new episodes: an unannounced restart."""

    def insert(self, acted: Any, step: Step, columns: Tensor | None = None) -> None:
        """Append a row to ``columns`` ([n] int64; default: all): what ``Actor.record`` returned, and the result."""
        raise NotImplementedError

    def positions(self) -> list[Tensor]:
        """Return the write positions, which are restored after a warm-up of the captured recording."""
        return []

    def state_dict(self) -> Any:
        """Return the tensors to save."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place."""
        raise NotImplementedError
