"""Batches with a share of demonstrations, as in RLPD (Ball et al. 2023, arXiv 2302.02948), which takes one half."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pql.config.schema import ReplayConfig
from pql.data.replay import Cursor, Replay
from pql.types import AnyBatch, interleaved, selected


class Demos:
    """Recorded transitions in a ring that nothing writes to.

    Args:
        settings: share of a batch, constant or linear in the env steps of the run.
    """

    def __init__(self, ring: Replay, settings: ReplayConfig):
        self.ring, self.settings = ring, settings
        self.cursor = Cursor(ring.num_envs, ring.device)
        self.cursor.head.copy_(ring.live.head)

    def mixed(
        self, draw: Callable[[Replay, Cursor, int], AnyBatch], run: tuple[Replay, Cursor], sizes: tuple[int, int]
    ) -> AnyBatch:
        """Return ``count`` batches of B rows, one after the other, [count * B, ...], with the share of demonstrations.

        Args:
            draw: (ring, cursor, rows) -> that many rows.
            run: the run's ring and cursor.
            sizes: count and B.
        """
        (count, size), settings = sizes, self.settings
        if settings.demo_share_end is None:
            shown = round(settings.demo_share * size)
            parts = [((self.ring, self.cursor), shown), (run, size - shown)]
            drawn = [draw(*source, count * rows) for source, rows in parts if rows]
            return drawn[0] if len(drawn) == 1 else cast(AnyBatch, interleaved(drawn, count))
        theirs, own = draw(self.ring, self.cursor, count * size), draw(*run, count * size)
        place = torch.arange(size, device=self.ring.device).repeat(count)
        return cast(AnyBatch, selected(place < self.share(run[1].env_steps) * size, theirs, own))

    def share(self, env_steps: Tensor | None) -> Tensor:
        """Return the share, a scalar, after ``env_steps`` (a scalar) of the run."""
        start, end = self.settings.demo_share, self.settings.demo_share_end
        assert end is not None
        assert env_steps is not None
        return start + (end - start) * (env_steps / self.settings.demo_steps).clamp(max=1.0)
