"""Atari games for actors: ``ale_py``'s native vector environment, with NumPy arrays.

Specification, settings and rules equal those of ``task=atari``; ``pql/envs/atari.py`` documents the quirks of
``ale_py`` that they work around.
"""

import functools
from pathlib import Path
from typing import Any, cast

import numpy as np
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from pql.contract.plain import Discrete, EnvSpec, ObsSpec, Step
from pql.contract.registry import takes
from pql.envs.atari_settings import AtariSimSettings
from pql.errors import ConfigError, nearest

SIZE, SKIP, STACK = 84, 4, 4
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class AtariSim:
    """``num_envs`` copies of one game; settings as in ``pql.envs.atari.AtariVec``. Fields are arrays [N, ...].

    Raises:
        ConfigError: unknown game or autoreset mode.
    """

    @takes(AtariSimSettings)
    def __init__(self, num_envs: int, device: Any = "cpu", **keywords: Any):
        settings = AtariSimSettings(**keywords)
        game, autoreset = settings.game, settings.autoreset
        games = roms.get_all_rom_ids()
        if game not in games:
            raise ConfigError("game", game, f"a game of ale_py, such as pong{nearest(game, games)}")
        if autoreset not in MODES:
            raise ConfigError("autoreset", autoreset, " or ".join(MODES))
        self.vec = AtariVectorEnv(
            game,
            num_envs,
            num_threads=settings.threads or 0,
            max_num_frames_per_episode=SKIP * settings.max_episode_steps,
            repeat_action_probability=settings.sticky,
            full_action_space=settings.full_actions,
            autoreset_mode=MODES[autoreset],
            img_height=SIZE,
            img_width=SIZE,
            stack_num=STACK,
            frameskip=SKIP,
            noop_max=settings.noop_max + 1 if settings.noop_max else 0,
            use_fire_reset=settings.fire_reset,
            reward_clipping=False,
        )
        self.life_loss, self.next = settings.life_loss, autoreset == "next_step"
        self.spec = EnvSpec(
            name=game,
            num_envs=num_envs,
            obs={"policy": ObsSpec((STACK, SIZE, SIZE), cast(Any, "uint8"), STACK)},
            action=Discrete(actions(game, settings.full_actions)),
            device=cast(Any, "cpu"),
            max_episode_steps=settings.max_episode_steps,
            autoreset=cast(Any, autoreset),
            final_obs="always",
            log=("score",),
            info={"dt": SKIP / 60, **({"lost_life": True} if settings.life_loss else {})},
        )
        self.ended = np.zeros(num_envs, dtype=bool)
        self.lives = np.zeros(num_envs, dtype=np.int32)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        count = self.spec.num_envs
        seeds = None if seed is None else np.random.SeedSequence(seed).generate_state(count).astype(np.int64) >> 1
        obs, info = self.vec.reset(seed=seeds)
        self.ended[:], self.lives = False, info["lives"]
        return {"policy": obs}

    def step(self, action: np.ndarray) -> Step:
        self.vec.send(action)
        obs, reward, terminated, truncated, info = self.vec.recv()
        over = terminated | truncated
        filler = self.ended if self.next else np.zeros_like(over)
        if self.life_loss:  # except for the last life, which ends the game
            terminated = terminated | ((info["lives"] < self.lives) & (info["lives"] > 0) & ~over & ~filler)
        self.ended, self.lives = over, info["lives"]
        final = obs
        if not self.next and over.any():
            final = np.where(over[:, None, None, None], info["final_obs"], obs)
        score: Any = reward.astype(np.float32)
        return Step(
            obs={"policy": obs},
            reward=score,
            terminated=terminated,
            truncated=truncated,
            first=filler if self.next else over,
            final_obs={"policy": final},
            final_ok=np.ones_like(over),
            valid=~filler,
            log={"score": score},
        )

    def close(self) -> None:
        self.vec.close()


@functools.cache
def actions(game: str, full: bool) -> int:
    """Return the number of actions of a game."""
    ALEInterface.setLoggerMode(LoggerMode.Error)  # no greeting
    console = ALEInterface()
    console.loadROM(cast(Path, roms.get_rom_path(game)))
    return len(console.getLegalActionSet() if full else console.getMinimalActionSet())
