"""State of the managers of Isaac Lab and mjlab, as their adapters read and set it: log, curricula, images."""

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import LogKind
from pql.errors import ConfigError, PqlWarning

COUNTS = "Episode_Termination/"  # number of environments ended by each reason


class Course(NamedTuple):
    """Settings of episodes that are not in the simulator's configuration.

    Attributes:
        random_lengths: the first ones start at random points of the time limit.
        curriculum_scale: factor on the steps at which stages of curricula begin.
        play: the configuration is the one for play.
    """

    random_lengths: bool = False
    curriculum_scale: float = 1.0
    play: bool = False


PLAIN = Course()


class Stages:
    """Curricula of an environment: the step counter that they read, and the levels of its terrain.

    Attributes:
        counted: the environment has a counter.
        levels: of the terrain at the next reset, [N]; None: the simulator's.
    Raises:
        ConfigError: a ``curriculum_scale`` that is not above 0.
    """

    def __init__(self, env: Any, course: Course):
        if not course.curriculum_scale > 0:
            raise ConfigError("curriculum_scale", course.curriculum_scale, "a number above 0")
        self.env, self.course, self.counted = env, course, hasattr(env, "common_step_counter")
        self.levels: Tensor | None = None
        self._count = 0.0  # steps in the unit of the stages

    def count_step(self) -> None:
        """Count a step of the simulator, which has counted a whole one."""
        if self.counted and self.course.curriculum_scale != 1:
            self._count += 1 / self.course.curriculum_scale
            self.env.common_step_counter = int(self._count)

    def progress(self) -> dict[str, Any]:
        """Return the counter, and the terrain's levels [N] if it has any. See ``Staged``."""
        found = {"common_step_counter": int(self.env.common_step_counter)}
        levels = getattr(self._terrain(), "terrain_levels", None)
        return found if levels is None else {**found, "terrain_levels": levels.clone()}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Set the counter, and the levels of the next reset, if they are of as many environments. See ``Staged``."""
        self._count = float(progress.get("common_step_counter", 0))
        self.env.common_step_counter = int(self._count)
        levels, own = progress.get("terrain_levels"), getattr(self._terrain(), "terrain_levels", None)
        fits = levels is not None and own is not None and levels.shape == own.shape
        self.levels = levels if fits and not self.course.play else None

    def _terrain(self) -> Any:
        return getattr(getattr(self.env, "scene", None), "terrain", None)

    def reset_on_levels(self) -> Any:
        """Reset all environments on terrain of ``levels``, which no curriculum changes meanwhile."""
        terrain, manager = self._terrain(), self.env.curriculum_manager
        levels, self.levels = self.levels, None
        terrain.terrain_levels[:] = levels.to(terrain.terrain_levels).clamp(0, len(terrain.terrain_origins) - 1)  # type: ignore[union-attr]
        terrain.env_origins[:] = terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types]
        compute, manager.compute = manager.compute, lambda *args, **kwargs: None
        try:
            return self.env.reset()
        finally:
            manager.compute = compute


def picture(env: Any, index: int, width: int | None, height: int | None) -> np.ndarray:
    """Return an image of environment ``index``, uint8 [H, W, 3], in the size of the configuration's ``viewer``. Raises
    ``ConfigError``: a size is asked for, or the simulator was not built with ``render_mode=rgb_array``."""
    for setting, value in (("width", width), ("height", height)):
        if value is not None:
            raise ConfigError(setting, value, "none: task.kwargs.settings.viewer sets the size of images")
    if getattr(env, "render_mode", None) != "rgb_array":
        raise ConfigError("render_mode", None, "rgb_array, given when the environment is made")
    camera = getattr(env, "viewport_camera_controller", None)  # Isaac Lab's
    if camera is not None:
        camera.set_view_env_index(index)
    elif index != env.cfg.viewer.env_idx:
        raise ConfigError("index", index, f"{env.cfg.viewer.env_idx}, from task.kwargs.settings.viewer.env_idx")
    return np.asarray(env.render(), np.uint8)


class Log:
    """Reader of ``extras["log"]``: means over the environments reset in a step, or counts (of reasons of episode ends),
    which become shares; and numbers of every step. On steps without a reset the old dict may still be present.

    Attributes:
        kinds: name of each term -> ``episode`` or ``step``.
    """

    def __init__(self, name: str, env: Any):
        self.name, self.env = name, env
        self.kinds: dict[str, LogKind] = {}
        self.last: Any = None
        self.newest: dict[str, Any] = {}  # of terms of a step, which a reset in the same step may have removed
        self._known: set[str] = set()

    def add_reset(self, extras: Mapping[str, Any]) -> None:
        """Learn the terms of a reset."""
        self.seen(extras)
        self.newest = numbers(self.last)
        self.kinds = dict.fromkeys(self.newest, "episode")

    def add_step(self, extras: Mapping[str, Any], over: bool) -> None:
        """Learn the terms of a step, in which episodes ended if ``over``: new ones and those written again."""
        self.seen(extras)
        found = {
            k: v for k, v in numbers(self.last).items() if k not in self.kinds or not (over or v is self.newest[k])
        }
        self.newest, self._known = found, {*self.kinds, *found, *(self.last or {})}
        self.kinds |= dict.fromkeys(found, "step")

    def seen(self, extras: Mapping[str, Any]) -> None:
        self.last = extras.get("log")

    def rows(self, over: Tensor, *given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return [N] per term: a number of the step on every row; that of episodes on the rows ``over``, if the log is
        new, else 0. ``given``: the extras of the step and, if it did not reset, of the reset."""
        logs = [extras.get("log") or {} for extras in given]
        fresh, self.last = given[-1].get("log") is not self.last, given[-1].get("log")
        out, none = {}, torch.zeros(len(over), device=over.device)
        for log in logs:
            self.newest |= {k: log[k] for k in self.newest if k in log}
            if unknown := log.keys() - self._known:
                self._tell(unknown)
        for name, kind in self.kinds.items():
            if kind == "step":
                out[name] = self._mean(self.newest[name], over).expand(len(over)).clone()
            else:
                ended = fresh and name in logs[-1]
                out[name] = torch.where(over, self._of_episode(name, logs[-1][name], over), none) if ended else none
        return out

    def _of_episode(self, name: str, value: Any, over: Tensor) -> Tensor:
        """Return the value [N] or [] of a term for the rows ``over`` [N] bool, which ended."""
        if not name.startswith(COUNTS):
            return self._mean(value, over)
        manager, reason = getattr(self.env, "termination_manager", None), name.removeprefix(COUNTS)
        if manager is not None and reason in manager.active_terms:  # newer versions log shares of all latest ends
            return manager.get_term(reason).float()
        return self._mean(value, over) / over.sum()

    @staticmethod
    def _mean(value: Any, over: Tensor) -> Tensor:
        return torch.as_tensor(value, device=over.device).float().mean()

    def _tell(self, unknown: set[str]) -> None:
        self._known |= unknown
        names = ", ".join(sorted(unknown))
        what = f"{self.name} logs {names} only after its first step: not in the log of this run"
        warnings.warn(what, PqlWarning, stacklevel=4)


def numbers(log: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers in a simulator's log: tensors count as their mean."""
    known = {k: v for k, v in (log or {}).items() if isinstance(v, Real | Tensor)}
    return {k: v for k, v in known.items() if not isinstance(v, Tensor) or v.numel()}
