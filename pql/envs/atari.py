"""Atari 2600 games as tensors: the consoles of ``pql/envs/atari_core.py``, in one group or in several."""

from collections import deque
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.contract.grouped import join_steps, joined
from pql.contract.registry import takes
from pql.envs import atari_core as core
from pql.envs.atari_core import SIZE, AtariSettings, AtariSim
from pql.envs.stage import Tensors, tensor_spec
from pql.errors import ConfigError
from pql.types import Obs, Step


class AtariVec:
    """``num_envs`` consoles with the same game.

    obs [N, 4, 84, 84] uint8 (``stack=4``); action [N] int64, the game's minimal set or all 18; reward: raw score of the
    row. Truncated after ``max_episode_steps``. ``log["score"]`` is the raw reward, too; its sum over a whole game is
    ``episode/score``, also if lives end episodes for learning.

    Args:
        num_envs: N.
        device: where the tensors go; the consoles run on the host.
        keywords: fields of :class:`AtariSettings`.
    Raises:
        ConfigError: an unknown game, or a value out of range.
    """

    @takes(AtariSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        self.spec, own = self.describe(num_envs, device, **keywords), asdict(AtariSettings(**keywords))
        count = own.pop("groups")
        self._groups = [Tensors(AtariSim(num_envs // count, **own), self.spec.device) for _ in range(count)]
        self._ids = torch.arange(num_envs).chunk(count)
        self._sent: deque[int] = deque()  # groups under way, oldest first

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments; loads the game to read its actions."""
        settings = AtariSettings(**keywords)
        spec = core.describe(num_envs, settings)
        if num_envs % settings.groups:
            raise ConfigError("groups", settings.groups, f"a divisor of num_envs={num_envs}")
        return tensor_spec(spec, device, groups=settings.groups, info={**spec.info, "truncates_at_limit": True})

    @staticmethod
    def games() -> list[str]:
        """Return the valid names for ``game``."""
        return core.games()

    def reset(self, seed: int | None = None) -> Obs:
        # Drawn for all consoles at once, so that a console's seeds do not depend on the groups.
        seeds, count = core.console_seeds(seed, self.spec.num_envs), len(self._groups)
        parts = [None] * count if seeds is None else np.split(seeds, count)
        return joined([g.shown(g.sim.restart(part)) for g, part in zip(self._groups, parts, strict=True)])

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the consoles of ``mask`` ([N] bool) and return all current observations."""
        return joined(
            [g.reset_where(part) for g, part in zip(self._groups, mask.chunk(len(self._groups)), strict=True)]
        )

    def step(self, action: Tensor) -> Step:
        for ids in self._ids:
            self.send(action[ids[0] : ids[-1] + 1], ids)
        return join_steps([self.recv()[1] for _ in self._ids])

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Send actions [n] to one group and return at once; ``ids`` [n] are those of :meth:`recv`."""
        group = int(ids[0]) // len(ids)
        self._groups[group].sim.send(action.cpu().numpy())
        self._sent.append(group)

    def recv(self) -> tuple[Tensor, Step]:
        """Wait for the group that was sent first: its ids [n], and its step (fields of [n, ...])."""
        group = self._sent.popleft()
        return self._ids[group], self._groups[group].stepped(self._groups[group].sim.receive())

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return the latest frame of console ``index`` with the screen's aspect: uint8 [H, W, 3], default 420 x 320."""
        width, height = width or 320, height or 420
        group, row = divmod(index, self.spec.num_envs // len(self._groups))
        frame = self._groups[group].sim.shown[row, -1]
        grey = frame[np.arange(height)[:, None] * SIZE // height, np.arange(width) * SIZE // width]
        return np.repeat(grey[:, :, None], 3, axis=2)

    def close(self) -> None:
        for group in self._groups:
            group.close()
