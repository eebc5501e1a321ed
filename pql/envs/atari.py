"""Atari 2600 games as tensors: the consoles of ``pql/envs/atari_core.py``, in one group or in several."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.contract.grouped import join_steps
from pql.contract.registry import takes
from pql.envs import atari_core as core
from pql.envs.atari_core import SHAPE, SIZE, AtariSettings, Consoles
from pql.envs.stage import Handover
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
        self.spec, settings = self.describe(num_envs, device, **keywords), AtariSettings(**keywords)
        each = num_envs // settings.groups
        self._groups = [Group(Consoles(settings, each), self.spec.device) for _ in range(settings.groups)]
        self._ids = torch.arange(num_envs).chunk(settings.groups)
        self._sent: deque[int] = deque()  # groups under way, oldest first

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments; loads the game to read its actions."""
        settings = AtariSettings(**keywords)
        core.check(num_envs, settings)
        if num_envs % settings.groups:
            raise ConfigError("groups", settings.groups, f"a divisor of num_envs={num_envs}")
        fields = core.spec_fields(settings)
        return EnvSpec(
            num_envs=num_envs,
            obs={"policy": ObsSpec(SHAPE, torch.uint8, stack=core.STACK)},
            action=Discrete(core.actions(settings.game, settings.full_actions)),
            device=torch.device(device),
            groups=settings.groups,
            **fields | {"info": {**fields["info"], "truncates_at_limit": True}},
        )

    @staticmethod
    def games() -> list[str]:
        """Return the valid names for ``game``."""
        return core.games()

    def reset(self, seed: int | None = None) -> Obs:
        n = self.spec.num_envs
        # Drawn for all consoles at once, so that a console's seeds do not depend on the groups.
        seeds = core.console_seeds(seed, n)
        each = n // len(self._groups)
        parts = [g.reset(None if seeds is None else seeds[i * each :][:each]) for i, g in enumerate(self._groups)]
        return {"policy": parts[0] if len(parts) == 1 else torch.cat(parts)}

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the consoles of ``mask`` ([N] bool) and return all current observations."""
        rows = np.split(mask.cpu().numpy(), len(self._groups))
        return {"policy": torch.cat([g.reset_where(part) for g, part in zip(self._groups, rows, strict=True)])}

    def step(self, action: Tensor) -> Step:
        for part, group in zip(np.split(action.cpu().numpy(), len(self._groups)), self._groups, strict=True):
            group.consoles.send(part)
        steps = [group.recv() for group in self._groups]
        return steps[0] if len(steps) == 1 else join_steps(steps)

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Send actions [n] to one group and return at once; ``ids`` [n] are those of :meth:`recv`."""
        group = int(ids[0]) // len(ids)
        self._groups[group].consoles.send(action.cpu().numpy())
        self._sent.append(group)

    def recv(self) -> tuple[Tensor, Step]:
        """Wait for the group that was sent first: its ids [n], and its step (fields of [n, ...])."""
        group = self._sent.popleft()
        return self._ids[group], self._groups[group].recv()

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return the latest frame of console ``index`` with the screen's aspect: uint8 [H, W, 3], default 420 x 320."""
        width, height = width or 320, height or 420
        group, row = divmod(index, self.spec.num_envs // len(self._groups))
        frame = self._groups[group].consoles.shown[row, -1]
        grey = frame[np.arange(height)[:, None] * SIZE // height, np.arange(width) * SIZE // width]
        return np.repeat(grey[:, :, None], 3, axis=2)

    def close(self) -> None:
        for group in self._groups:
            group.consoles.vec.close()


class Group:
    """Consoles that step together, whose arrays become tensors on ``device``."""

    def __init__(self, consoles: Consoles, device: torch.device):
        self.consoles, self._hand = consoles, Handover(device)
        self._true = torch.ones(len(consoles.lives), dtype=torch.bool, device=device)

    def reset(self, seeds: np.ndarray | None) -> Tensor:
        self.consoles.reset(seeds)
        return self._show()

    def reset_where(self, mask: np.ndarray) -> Tensor:
        if mask.any():
            self.consoles.reset(mask=mask)
        return self._show()

    def _show(self) -> Tensor:
        self._hand.wait()
        obs = self._hand.send("obs", self.consoles.shown)
        self._hand.sent()
        return obs

    def recv(self) -> Step:
        one, hand = self.consoles.receive(), self._hand
        flags = np.stack((one.terminated, one.truncated, one.first, one.valid))
        hand.wait()
        seen, sent, scored = hand.send("obs", one.obs), hand.send("flags", flags), hand.send("reward", one.reward)
        final = seen if one.final_obs is one.obs else hand.send("final", one.final_obs)
        hand.sent()
        score, (ends, cuts, first, valid) = scored.float(), sent.unbind(0)
        return Step({"policy": seen}, score, ends, cuts, first, {"policy": final}, self._true, valid, {"score": score})
