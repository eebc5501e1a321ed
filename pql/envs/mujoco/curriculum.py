"""Curricula: set the difficulty of an environment's next episode from the outcome of the previous ones.

A curriculum is a pure function over batched tensors, so it runs on either engine without waiting for a device. Its
result, ``level`` [N] in 0..1, scales the randomisation, and the task can read it (``memory["level"]``).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pql.contract.registry import check_keywords, import_name
from pql.envs.mujoco.engine import Rows
from pql.envs.mujoco.randomize import amount
from pql.errors import ConfigError, nearest


class Progress(NamedTuple):
    """Input of a curriculum after each step, before ended episodes are replaced."""

    ended: Tensor  # [N] bool; this step ended an episode; results for other rows are ignored
    steps: Tensor  # [N] int64; env steps of the episode so far
    returns: Tensor  # [N]; its sum of rewards so far
    success: Tensor  # [N] bool; the task reported ``success`` at some step of it
    limit: int  # the time limit in env steps
    total: Tensor  # 0-dim int64; env steps of all environments since the first reset


Curriculum = Callable[[Tensor, Progress], Tensor]
"""(level [N], progress) -> the next episodes' levels [N]; clamped to 0..1 by the caller."""


def survive(up: float = 0.1, down: float = 0.1) -> Curriculum:
    """Raise the level where an episode reached its time limit, lower it where it ended before half of it."""
    up, down = amount("curriculum.up", up), amount("curriculum.down", down)

    def next_level(level: Tensor, progress: Progress) -> Tensor:
        lasted, short = progress.steps >= progress.limit, progress.steps * 2 < progress.limit
        return level + up * lasted - down * short

    return next_level


def succeed(up: float = 0.1, down: float = 0.05) -> Curriculum:
    """Raise the level where an episode was a success, lower it elsewhere."""
    up, down = amount("curriculum.up", up), amount("curriculum.down", down)

    def next_level(level: Tensor, progress: Progress) -> Tensor:
        return torch.where(progress.success, level + up, level - down)

    return next_level


def linear(steps: float = 1e7) -> Curriculum:
    """Raise the level from 0 to 1 over ``steps`` env steps of all environments, whatever the outcomes."""
    steps = amount("curriculum.steps", steps, zero=False)

    def next_level(level: Tensor, progress: Progress) -> Tensor:
        return torch.zeros_like(level) + progress.total / steps

    return next_level


KINDS: dict[str, Callable[..., Curriculum]] = {"survive": survive, "succeed": succeed, "linear": linear}


def make_curriculum(settings: Mapping[str, Any] | None) -> Curriculum | None:
    """Build a curriculum from ``{"kind": NAME, **keywords}``; None gives None. NAME is one of ``KINDS`` or
    ``module:function``, where the function returns a :data:`Curriculum`.

    Raises:
        ConfigError: no such kind, or keywords or values that it does not accept.
    """
    if not settings:
        return None
    keywords = {str(name): value for name, value in settings.items()}
    kind = str(keywords.pop("kind", ""))
    if ":" in kind:
        made = import_name("curriculum.kind", kind)
    elif kind in KINDS:
        made = KINDS[kind]
    else:
        allowed = f"one of {', '.join(KINDS)}, or module:function{nearest(kind, KINDS)}"
        raise ConfigError("curriculum.kind", kind or None, allowed)
    try:
        check_keywords(made, keywords, "curriculum.")
        return made(**keywords)
    except TypeError as error:
        raise ConfigError("curriculum", keywords, f"keywords of {kind} ({error})") from error


class Levels:
    """Each environment's level and progress. Without a curriculum all levels are 1."""

    def __init__(self, curriculum: Curriculum | None, num_envs: int, limit: int, device: torch.device):
        self._curriculum, self._limit = curriculum, limit
        self.active = curriculum is not None
        self.level = torch.ones(num_envs, device=device)
        self._returns = torch.zeros(num_envs, device=device)
        self._success = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._cut = torch.zeros(num_envs, dtype=torch.bool, device=device)  # started late in the time limit
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._begin = (0.0, 0)  # level and total after a restart
        self.restart()

    def restart(self) -> None:
        """Reset levels to 0, or to the stage of :meth:`load_progress`, and clear the statistics."""
        if self.active:
            self.level.fill_(self._begin[0])
            self._total.fill_(self._begin[1])

    def progress(self) -> dict[str, float]:
        """Return the mean level and the env steps of all environments."""
        return {"level": float(self.level.mean()), "total": int(self._total)}

    def load_progress(self, progress: Mapping[str, float]) -> None:
        """Let :meth:`restart` begin at this stage, all environments at the same level."""
        self._begin = (min(float(progress.get("level", 0.0)), 1.0), int(progress.get("total", 0)))

    def cut_short(self) -> None:
        """Mark all current episodes as shortened: their outcomes change no level."""
        if self.active:
            self._cut.fill_(True)

    def abandon(self, rows: Rows) -> None:
        """Drop the statistics of the episodes in ``rows``, which restart."""
        if self.active:
            for gathered in (self._returns, self._success, self._cut):
                gathered.copy_(rows.put(gathered, rows.take(torch.zeros_like(gathered))))

    def follow(self, reward: Tensor, success: Tensor | None, ended: Tensor, steps: Tensor) -> Tensor:
        """Update ``level`` after a step where episodes ended that were not shortened. Call :meth:`abandon` next.
        Arguments are [N]. Return the levels of the ended episodes for the log, [N], 0 elsewhere."""
        if self._curriculum is None:
            return torch.zeros_like(self.level)
        self._total += len(ended)
        self._returns += reward
        if success is not None:
            self._success |= success > 0
        log = self.level * ended
        progress = Progress(ended, steps, self._returns, self._success, self._limit, self._total)
        new = self._curriculum(self.level, progress).clamp(0.0, 1.0)
        self.level.copy_(torch.where(ended & ~self._cut, new, self.level))
        return log

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "level": self.level.clone(),
            "returns": self._returns.clone(),
            "success": self._success.clone(),
            "cut": self._cut.clone(),
            "total": self._total.clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore levels and episode statistics, [N] each."""
        for name in ("level", "returns", "success", "cut", "total"):
            (self.level if name == "level" else getattr(self, f"_{name}")).copy_(state[name])
