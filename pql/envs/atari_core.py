"""Consoles of Atari 2600 games with NumPy arrays: settings, construction and steps. Needs no torch.

Shared by ``task=atari`` and its remote actors. ``ale_py``'s native vector environment steps the consoles (C++ threads;
it brings the games). Frames as in Mnih et al. 2015: an action is held for four frames of the console, the observation
is the pixelwise maximum of the last two in grey, 84 x 84, and four of these are stacked, zeros before the episode.
Rewards are raw scores: learners clip (``task.reward_clip``). Workarounds for ``ale_py``: it clips rewards and presses
FIRE by default; it draws no-ops from 0 .. noop_max - 1; its flag for a lost life is the same as for the end of the
game.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from pql.contract.plain import Discrete, EnvSpec, ObsSpec, Step
from pql.contract.registry import takes
from pql.errors import ConfigError, nearest

SIZE, SKIP, STACK = 84, 4, 4
SHAPE = (STACK, SIZE, SIZE)
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


@dataclass(frozen=True)
class AtariSimSettings:
    """Keywords of a remote actor's games.

    Attributes:
        game: ``ale_py``'s name: ``pong``, ``ms_pacman``, ...
        autoreset: ``same_step`` or ``next_step`` (a filler row follows each end).
        noop_max: a game begins with 0 .. ``noop_max`` frames without an action, drawn for every game.
        sticky: probability, at every frame of the console, that the last action is repeated instead.
        full_actions: all 18 actions instead of those that the game uses.
        life_loss: a lost life terminates (for learning; the game continues, so ``first`` is not set).
        fire_reset: press FIRE once when a game begins, if the game has that action.
        max_episode_steps: time limit in actions, four frames each; 27,000 correspond to 30 minutes of play.
        threads: threads that step the consoles of each group; None or 0: one per core.
    """

    game: str = "pong"
    autoreset: str = "same_step"
    noop_max: int = 30
    sticky: float = 0.0
    full_actions: bool = False
    life_loss: bool = False
    fire_reset: bool = False
    max_episode_steps: int = 27_000
    threads: int | None = None


@dataclass(frozen=True)
class AtariSettings(AtariSimSettings):
    """Keywords of ``pql.envs.atari.AtariVec``.

    Attributes:
        groups: consoles are divided into this many groups of neighbours for ``send`` and ``recv``.
    """

    groups: int = 1


class AtariSim:
    """``num_envs`` consoles with one game, for remote actors and for ``pql.envs.atari``. Fields are arrays [N, ...].

    ``shown`` [N, 4, 84, 84] is the latest observation, ``lives`` [N] the lives left. ``keywords``: fields of
    :class:`AtariSimSettings`. Raises ``ConfigError``: unknown game, or a value out of range.
    """

    @takes(AtariSimSettings)
    def __init__(self, num_envs: int, device: Any = "cpu", **keywords: Any):
        settings = AtariSimSettings(**keywords)
        self.spec = describe(num_envs, settings)
        frames: dict[str, Any] = {"img_height": SIZE, "img_width": SIZE, "stack_num": STACK, "frameskip": SKIP}
        self.vec = AtariVectorEnv(
            settings.game,
            num_envs,
            num_threads=settings.threads or 0,
            max_num_frames_per_episode=SKIP * settings.max_episode_steps,
            repeat_action_probability=settings.sticky,
            full_action_space=settings.full_actions,
            autoreset_mode=MODES[settings.autoreset],
            noop_max=settings.noop_max + 1 if settings.noop_max else 0,
            use_fire_reset=settings.fire_reset,
            reward_clipping=False,
            **frames,
        )
        self._life_loss, self._next = settings.life_loss, settings.autoreset == "next_step"
        self._ended = np.zeros(num_envs, dtype=bool)
        self.lives = np.zeros(num_envs, dtype=np.int32)
        self.shown = np.zeros((num_envs, *SHAPE), dtype=np.uint8)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        """Restart all consoles; return their observations."""
        return self.restart(console_seeds(seed, self.spec.num_envs))

    def restart(self, seeds: np.ndarray | None) -> dict[str, np.ndarray]:
        """Restart all consoles with ``seeds`` [N]; return their observations."""
        self.shown, info = self.vec.reset(seed=seeds)
        self.lives, self._ended = info["lives"], np.zeros_like(self._ended)
        return {"policy": self.shown}

    def reset_where(self, mask: np.ndarray) -> dict[str, np.ndarray]:
        """Restart the consoles of ``mask`` [N] bool; return the observations of all."""
        if mask.any():
            self.shown, info = self.vec.reset(options={"reset_mask": mask})
            self.lives, self._ended = info["lives"], self._ended & ~mask
        return {"policy": self.shown}

    def step(self, action: np.ndarray) -> Step:
        """Step all consoles with ``action`` [N]."""
        self.send(action)
        return self.receive()

    def send(self, action: np.ndarray) -> None:
        self.vec.send(action)

    def receive(self) -> Step:
        """Wait for the step that :meth:`send` began."""
        obs, reward, terminated, truncated, info = self.vec.recv()
        over = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(over)
        if self._life_loss:  # except for the last life, which ends the game
            terminated = terminated | ((info["lives"] < self.lives) & (info["lives"] > 0) & ~over & ~filler)
        self._ended, self.lives, self.shown = over, info["lives"], obs
        final = obs
        if not self._next and over.any():
            final = np.where(over[:, None, None, None], info["final_obs"], obs)
        score, first, seen = reward.astype(np.float32), filler if self._next else over, {"policy": obs}
        known = np.ones_like(over)
        return Step(seen, score, terminated, truncated, first, {"policy": final}, known, ~filler, {"score": score})

    def close(self) -> None:
        self.vec.close()


def check(num_envs: int, settings: AtariSimSettings) -> None:
    """Raise ``ConfigError`` for an unknown game, or a value out of range."""
    if settings.game not in (names := games()):
        # MsPacman, as gymnasium writes it
        near = nearest(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", settings.game).lower(), names)
        raise ConfigError("game", settings.game, f"a game of ale_py, such as pong or ms_pacman{near}")
    if settings.autoreset not in MODES:
        raise ConfigError("autoreset", settings.autoreset, " or ".join(MODES))
    for setting, count, least in (
        ("noop_max", settings.noop_max, 0),
        ("threads", settings.threads or 0, 0),
        ("num_envs", num_envs, 1),
        ("max_episode_steps", settings.max_episode_steps, 1),
        ("groups", getattr(settings, "groups", 1), 1),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ConfigError(setting, count, f"a whole number, at least {least}")
    if not isinstance(settings.sticky, int | float) or not 0 <= settings.sticky < 1:
        raise ConfigError("sticky", settings.sticky, "a probability below 1")
    for setting in ("full_actions", "life_loss", "fire_reset"):
        flag = getattr(settings, setting)
        if not isinstance(flag, bool):
            raise ConfigError(setting, flag, "true or false")


def describe(num_envs: int, settings: AtariSimSettings) -> EnvSpec:
    """Return the specification of :class:`AtariSim`; loads the game to read its actions. Raises ``ConfigError``: as
    :func:`check`."""
    check(num_envs, settings)
    return EnvSpec(
        name=settings.game,
        num_envs=num_envs,
        obs={"policy": ObsSpec(SHAPE, "uint8", STACK)},
        action=Discrete(actions(settings.game, settings.full_actions)),
        device="cpu",
        max_episode_steps=settings.max_episode_steps,
        autoreset=settings.autoreset,
        final_obs="always",
        log=("score",),
        info={"dt": SKIP / 60, **({"lost_life": True} if settings.life_loss else {})},
    )


def console_seeds(seed: int | None, count: int) -> np.ndarray | None:
    """Return a seed [count] for each console."""
    return None if seed is None else np.random.SeedSequence(seed).generate_state(count).astype(np.int64) >> 1


def games() -> list[str]:
    """Return the valid names for ``game``."""
    return sorted(roms.get_all_rom_ids())


@functools.cache
def actions(game: str, full: bool) -> int:
    """Return the number of a game's actions."""
    ALEInterface.setLoggerMode(LoggerMode.Error)  # without the start-up message
    console = ALEInterface()
    console.loadROM(cast(Path, roms.get_rom_path(game)))
    return len(console.getLegalActionSet() if full else console.getMinimalActionSet())
