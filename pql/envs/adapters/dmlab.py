"""DeepMind Lab's levels: ``task=dmlab task.kwargs.level=contributed/dmlab30/explore_goal_locations_small``.

The simulator is not on a package index: it is built with Bazel into a wheel for one Python (``python/pip_package`` of
github.com/google-deepmind/lab), which may differ from the learner's: see ``task.process.python``, ``pql actor``.

Observations and actions are those of Espeholt et al. 2018 (IMPALA): 96 x 72 pixels in colour, an action held for four
frames, nine actions; or the fifteen of Hessel et al. 2019 (PopArt-IMPALA). The end of an episode, by time or by the
level's rules, is terminal, as in those papers: the simulator does not report which it was, and has no observation after
it.

This file needs only Python 3.8, NumPy and the simulator.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from pql.contract.plain import ConfigError, Discrete, EnvSpec, ObsSpec, Step

# Look right and down (pixels a frame), strafe right, forward, fire, jump, crouch.
NINE = (
    (0, 0, 0, 1, 0, 0, 0),
    (0, 0, 0, -1, 0, 0, 0),
    (0, 0, -1, 0, 0, 0, 0),
    (0, 0, 1, 0, 0, 0, 0),
    (-20, 0, 0, 0, 0, 0, 0),
    (20, 0, 0, 0, 0, 0, 0),
    (-20, 0, 0, 1, 0, 0, 0),
    (20, 0, 0, 1, 0, 0, 0),
    (0, 0, 0, 0, 1, 0, 0),
)
FIFTEEN = (
    *NINE[:4],
    (-10, 0, 0, 0, 0, 0, 0),
    (10, 0, 0, 0, 0, 0, 0),
    (-60, 0, 0, 0, 0, 0, 0),
    (60, 0, 0, 0, 0, 0, 0),
    (0, 10, 0, 0, 0, 0, 0),
    (0, -10, 0, 0, 0, 0, 0),
    (-10, 0, 0, 1, 0, 0, 0),
    (10, 0, 0, 1, 0, 0, 0),
    (-60, 0, 0, 1, 0, 0, 0),
    (60, 0, 0, 1, 0, 0, 0),
    NINE[8],
)
ACTIONS = {9: NINE, 15: FIFTEEN}
PIXELS = "RGB_INTERLEAVED"
INSTALL = (
    "the package deepmind_lab, built from github.com/google-deepmind/lab (docs/simulators.md): "
    "bazel build -c opt //python/pip_package:build_pip_package; or a Python that has it: task.process.python=PATH"
)


def dmlab(
    num_envs: int = 8,
    device: Any = "cpu",
    level: str = "contributed/dmlab30/explore_goal_locations_small",
    actions: int = 9,
    repeat: int = 4,
    width: int = 96,
    height: int = 72,
    renderer: str = "software",
    cache: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Make ``num_envs`` copies of a level, stepped sequentially: for more cores, use actors or ``placement.groups``.

    obs [N, 3, height, width] uint8; action [N] int64; reward: sum of the level's rewards over the frames of a step.

    Args:
        device: device of the tensors; a string (in a Python without torch): NumPy arrays are returned.
        level: the simulator's name of the level.
        actions: 9 or 15, see above.
        repeat: frames for which an action is held.
        renderer: ``software``, or ``hardware`` (EGL).
        cache: folder for compiled maps, which many levels build for every episode; several runs may share it.
        settings: the simulator's settings: ``datasetPath``, ``mixerSeed``, ``allowHoldOutLevels``, ...
    Raises:
        ConfigError: the simulator is not installed, or refuses the level or a setting.
    """
    if actions not in ACTIONS:
        raise ConfigError("actions", actions, "9 or 15")
    for name, value in (("repeat", repeat), ("width", width), ("height", height)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "a whole number, at least 1")
    try:
        import deepmind_lab as simulator
    except ImportError as error:
        raise ConfigError("task", "dmlab", INSTALL) from error
    config = {"width": width, "height": height, "logLevel": "WARN", **(settings or {})}
    words: dict[str, Any] = {"config": {k: str(v) for k, v in config.items()}, "renderer": renderer}
    if cache is not None:
        words["level_cache"] = Maps(cache)
    try:
        labs = [simulator.Lab(level, [PIXELS], **words) for _ in range(num_envs)]
    except (RuntimeError, ValueError) as error:
        raise ConfigError("level", level, f"a level and settings that DeepMind Lab takes ({error})") from error
    made = DmLab(labs, level, ACTIONS[actions], repeat, (3, height, width))
    if isinstance(device, str):
        return made
    from pql.envs.stage import Tensors

    return Tensors(made, device)


class DmLab:
    """Several ``deepmind_lab.Lab`` with batched arrays."""

    def __init__(self, labs: list[Any], level: str, actions: Any, repeat: int, shape: tuple[int, int, int]):
        self.labs, self.actions, self.repeat = labs, np.array(actions, dtype=np.intc), repeat
        spaces = ({"policy": ObsSpec(shape, "uint8")}, Discrete(len(actions)))
        info = {"dt": repeat / labs[0].fps()}
        self.spec = EnvSpec(level.rpartition("/")[2], len(labs), *spaces, "cpu", final_obs="never", info=info)
        self.random = [np.random.RandomState(i) for i in range(len(labs))]

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        if seed is not None:
            parts = np.random.SeedSequence(seed).generate_state(len(self.labs))
            self.random = [np.random.RandomState(part) for part in parts]
        for i in range(len(self.labs)):
            self.begin(i)
        return {"policy": self.show()}

    def begin(self, i: int) -> None:
        self.labs[i].reset(seed=int(self.random[i].randint(2**31 - 1)))

    def show(self) -> Any:
        """Return the frames [N, 3, height, width], from [height, width, 3] each."""
        return np.stack([np.moveaxis(lab.observations()[PIXELS], 2, 0) for lab in self.labs])

    def step(self, action: Any) -> Step:
        chosen = np.asarray(action)
        reward = np.zeros(len(self.labs), dtype=np.float32)
        ended = np.zeros(len(self.labs), dtype=bool)
        for i, lab in enumerate(self.labs):
            reward[i] = lab.step(self.actions[chosen[i]], num_steps=self.repeat)
            ended[i] = not lab.is_running()
            if ended[i]:
                self.begin(i)
        obs = self.show()
        none = np.zeros_like(ended)
        return Step({"policy": obs}, reward, ended, none, ended.copy(), {"policy": obs}, ~ended, ~none, {})

    def close(self) -> None:
        for lab in self.labs:
            lab.close()


class Maps:
    """Folder of compiled maps under the simulator's keys: its ``level cache`` interface."""

    def __init__(self, folder: str):
        place = os.path.expanduser(folder)
        if place.startswith("~"):
            raise ConfigError("cache", folder, "a folder; no user of this machine has that home directory")
        self.folder = os.path.abspath(place)
        os.makedirs(self.folder, exist_ok=True)

    def path(self, key: str) -> str:
        return os.path.join(self.folder, hashlib.sha256(key.encode()).hexdigest())

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Copy the map to ``pk3_path``; return False if there is none."""
        try:
            shutil.copyfile(self.path(key), pk3_path)
        except FileNotFoundError:
            return False
        return True

    def write(self, key: str, pk3_path: str) -> None:
        """Store the map atomically: other processes may write the same one."""
        part = f"{self.path(key)}.{os.getpid()}"
        shutil.copyfile(pk3_path, part)
        os.replace(part, self.path(key))
