"""Atari 2600 games: ``ale_py``'s native vector environment (C++ threads; the games come with the package).

Frames as in Mnih et al. 2015: an action is held for four frames of the console, the observation is the pixelwise
maximum of the last two in grey, 84 x 84, and four of these are stacked, zeros before the episode. Rewards are raw
scores: learners clip (``task.reward_clip``). Workarounds for ``ale_py``: it clips rewards and presses FIRE by default;
it draws no-ops from 0 .. noop_max - 1; its flag for a lost life is the same as for the end of the game.
"""

import functools
import re
from collections import deque
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from torch import Tensor

from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.contract.grouped import join_steps
from pql.contract.registry import takes
from pql.envs.atari_settings import AtariSettings
from pql.envs.classic import positive
from pql.envs.stage import Handover
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step

SIZE, SKIP, STACK = 84, 4, 4
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


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
        options: dict[str, Any] = {
            "num_threads": settings.threads or 0,
            "max_num_frames_per_episode": SKIP * settings.max_episode_steps,
            "repeat_action_probability": settings.sticky,
            "full_action_space": settings.full_actions,
            "autoreset_mode": MODES[settings.autoreset],
            "img_height": SIZE,
            "img_width": SIZE,
            "stack_num": STACK,
            "frameskip": SKIP,
            "noop_max": settings.noop_max + 1 if settings.noop_max else 0,
            "use_fire_reset": settings.fire_reset,
            "reward_clipping": False,
        }
        self._groups = [
            Group(AtariVectorEnv(settings.game, each, **options), self.spec, settings.life_loss)
            for _ in range(settings.groups)
        ]
        self._ids = torch.arange(num_envs).chunk(settings.groups)
        self._sent: deque[int] = deque()  # groups under way, oldest first

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments; loads the game to read its actions."""
        settings = AtariSettings(**keywords)
        if settings.game not in (games := cls.games()):
            # MsPacman, as gymnasium writes it
            near = nearest(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", settings.game).lower(), games)
            raise ConfigError("game", settings.game, f"a game of ale_py, such as pong or ms_pacman{near}")
        if settings.autoreset not in MODES:
            raise ConfigError("autoreset", settings.autoreset, " or ".join(MODES))
        for setting, count in (("noop_max", settings.noop_max), ("threads", settings.threads or 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(setting, count, "a whole number, at least 0")
        if not isinstance(settings.sticky, int | float) or not 0 <= settings.sticky < 1:
            raise ConfigError("sticky", settings.sticky, "a probability below 1")
        for setting in ("full_actions", "life_loss", "fire_reset"):
            flag = getattr(settings, setting)
            if not isinstance(flag, bool):
                raise ConfigError(setting, flag, "true or false")
        if positive("num_envs", num_envs) % positive("groups", settings.groups):
            raise ConfigError("groups", settings.groups, f"a divisor of num_envs={num_envs}")
        return EnvSpec(
            name=settings.game,
            num_envs=num_envs,
            obs={"policy": ObsSpec((STACK, SIZE, SIZE), torch.uint8, stack=STACK)},
            action=Discrete(_actions(settings.game, settings.full_actions)),
            device=torch.device(device),
            max_episode_steps=positive("max_episode_steps", settings.max_episode_steps),
            autoreset=cast(Literal["same_step", "next_step"], settings.autoreset),
            final_obs="always",
            log=("score",),
            groups=settings.groups,
            info={"dt": SKIP / 60, "truncates_at_limit": True, **({"lost_life": True} if settings.life_loss else {})},
        )

    @staticmethod
    def games() -> list[str]:
        """Return the valid names for ``game``."""
        return sorted(roms.get_all_rom_ids())

    def reset(self, seed: int | None = None) -> Obs:
        n = self.spec.num_envs
        # Drawn for all consoles at once, so that a console's seeds do not depend on the groups.
        seeds = None if seed is None else np.random.SeedSequence(seed).generate_state(n).astype(np.int64) >> 1
        each = n // len(self._groups)
        parts = [g.reset(None if seeds is None else seeds[i * each :][:each]) for i, g in enumerate(self._groups)]
        return {"policy": parts[0] if len(parts) == 1 else torch.cat(parts)}

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the consoles of ``mask`` ([N] bool) and return all current observations."""
        rows = np.split(mask.cpu().numpy(), len(self._groups))
        return {"policy": torch.cat([g.reset_where(part) for g, part in zip(self._groups, rows, strict=True)])}

    def step(self, action: Tensor) -> Step:
        for part, group in zip(np.split(action.cpu().numpy(), len(self._groups)), self._groups, strict=True):
            group.send(part)
        steps = [group.recv() for group in self._groups]
        return steps[0] if len(steps) == 1 else join_steps(steps)

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Send actions [n] to one group and return at once; ``ids`` [n] are those of :meth:`recv`."""
        group = int(ids[0]) // len(ids)
        self._groups[group].send(action.cpu().numpy())
        self._sent.append(group)

    def recv(self) -> tuple[Tensor, Step]:
        """Wait for the group that was sent first: its ids [n], and its step (fields of [n, ...])."""
        group = self._sent.popleft()
        return self._ids[group], self._groups[group].recv()

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return the latest frame of console ``index`` with the screen's aspect: uint8 [H, W, 3], default 420 x 320."""
        width, height = width or 320, height or 420
        group, row = divmod(index, self.spec.num_envs // len(self._groups))
        frame = self._groups[group].shown[row, -1]
        grey = frame[np.arange(height)[:, None] * SIZE // height, np.arange(width) * SIZE // width]
        return np.repeat(grey[:, :, None], 3, axis=2)

    def close(self) -> None:
        for group in self._groups:
            group.vec.close()


class Group:
    """Consoles that step together: one ``AtariVectorEnv`` whose results become a ``Step``."""

    def __init__(self, vec: AtariVectorEnv, spec: EnvSpec, life_loss: bool):
        self.vec, self.life_loss, self._next = vec, life_loss, spec.autoreset == "next_step"
        self._hand = Handover(spec.device)
        self._true = torch.ones(vec.num_envs, dtype=torch.bool, device=spec.device)
        self._ended = np.zeros(vec.num_envs, dtype=bool)
        self._lives = np.zeros(vec.num_envs, dtype=np.int32)
        self.shown = np.zeros((vec.num_envs, STACK, SIZE, SIZE), dtype=np.uint8)

    def reset(self, seeds: np.ndarray | None, options: dict[str, np.ndarray] | None = None) -> Tensor:
        self.shown, info = self.vec.reset(seed=seeds, options=options)
        self._lives = info["lives"]
        self._ended &= False if options is None else ~options["reset_mask"]
        return self._show()

    def reset_where(self, mask: np.ndarray) -> Tensor:
        return self.reset(None, {"reset_mask": mask}) if mask.any() else self._show()

    def _show(self) -> Tensor:
        self._hand.wait()
        obs = self._hand.send("obs", self.shown)
        self._hand.sent()
        return obs

    def send(self, action: np.ndarray) -> None:
        self.vec.send(action)

    def recv(self) -> Step:
        obs, reward, terminated, truncated, info = self.vec.recv()
        over = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(over)
        if self.life_loss:  # except for the last life, which ends the game
            terminated = terminated | ((info["lives"] < self._lives) & (info["lives"] > 0) & ~over & ~filler)
        self._ended, self._lives, self.shown = over, info["lives"], obs
        flags = np.stack((terminated, truncated, filler if self._next else over, ~filler))
        hand = self._hand
        hand.wait()
        seen, sent, scored = hand.send("obs", obs), hand.send("flags", flags), hand.send("reward", reward)
        final = seen  # the final observation, except on rows that were reset
        if not self._next and over.any():
            final = hand.send("final", np.where(over[:, None, None, None], info["final_obs"], obs))
        hand.sent()
        score, (ends, cuts, first, valid) = scored.float(), sent.unbind(0)
        return Step({"policy": seen}, score, ends, cuts, first, {"policy": final}, self._true, valid, {"score": score})


@functools.cache
def _actions(game: str, full: bool) -> int:
    """Return the number of a game's actions."""
    ALEInterface.setLoggerMode(LoggerMode.Error)  # without the start-up message
    console = ALEInterface()
    console.loadROM(cast(Path, roms.get_rom_path(game)))
    return len(console.getLegalActionSet() if full else console.getMinimalActionSet())
