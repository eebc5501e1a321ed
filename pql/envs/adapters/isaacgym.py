"""Isaac Gym's tasks, through IsaacGymEnvs 1.5: ``task=isaacgym task.kwargs.task=Ant task.process.python=...``.

Isaac Gym needs Python 3.8 or older, must be imported before torch, and allows one simulation per process. It therefore
runs in a separate process (``process.py``), and this file is executed there, by that Python.

How episodes that have ended are reset depends on the task (``timing``):

post    in the next step, after its physics: that row is a filler with the next episode's first observation (Ant,
        Humanoid, Anymal, Cartpole, Franka ...)
pre     in the next step, before its physics: the filler has simulated one step under the old action (the hands, Kuka,
        Ball Balance, Trifinger, Ingenuity, Quadcopter, Factory, IndustReal)
same    in the same step: the final observation is lost. The simulator never sets its time-limit flag, so the limit is
        detected by counting (AnymalTerrain)
manual  by ``reset_done`` before the next step (HumanoidAMP)

The simulator's ``reset`` resets nothing and returns zeros, so a step with zero actions is taken first and discarded. An
episode has ``max_episode_length - 1`` rows, one less under ``pre``. A failure in an episode's last row cannot be
distinguished from the time limit. The simulator's log is not used: its values cover single resets.
"""

from __future__ import annotations

import os
from typing import Any

from pql.contract.plain import Box, ConfigError, EnvSpec, ObsSpec, Step

TIMINGS = ("post", "pre", "same", "manual")
LOCKSTEP = ("Factory", "IndustReal")  # tasks whose environments all begin and end together
PRE = ("ShadowHand", "AllegroHand", "AllegroKuka", "BallBalance", "Trifinger", "Ingenuity", "Quadcopter", *LOCKSTEP)


def isaacgym(
    num_envs: int = 4096,
    device: Any = "cuda:0",
    task: str = "Ant",
    overrides: Any = (),
    timing: str | None = None,
    random_lengths: bool = False,
) -> IsaacGymVec:
    """Make a task of IsaacGymEnvs.

    Args:
        num_envs: N.
        device: device of the physics and the tensors.
        task: its name in IsaacGymEnvs.
        overrides: overrides of IsaacGymEnvs' configuration, ``task.env.episodeLength=500``.
        timing: timing of its resets; None: the known one for the task.
        random_lengths: start the first episodes at random points of the time limit, so that they do not end together.
    Raises:
        ConfigError: no such task or timing, or random lengths where all environments must begin together.
    """
    if timing is None:
        timing = {"AnymalTerrain": "same", "HumanoidAMP": "manual"}.get(task, "pre" if task.startswith(PRE) else "post")
    if timing not in TIMINGS:
        raise ConfigError("timing", timing, "one of " + ", ".join(TIMINGS))
    if random_lengths and task.startswith(LOCKSTEP):
        raise ConfigError("random_lengths", True, "false: all environments of " + task + " begin and end together")
    return IsaacGymVec(make_task(task, num_envs, str(device), list(overrides)), task, timing, random_lengths)


def make_task(task: str, num_envs: int, device: str, overrides: list) -> Any:
    """Make the package's ``VecTask`` from its own configuration, headless."""
    import isaacgym  # noqa: F401  before torch, or it refuses
    import isaacgymenvs
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    folder = os.path.join(os.path.dirname(os.path.abspath(isaacgymenvs.__file__)), "cfg")
    if not os.path.exists(os.path.join(folder, "task", task + ".yaml")):
        known = sorted(name[: -len(".yaml")] for name in os.listdir(os.path.join(folder, "task")))
        raise ConfigError("task", task, "one of " + ", ".join(known))
    words = ["task=" + task, f"num_envs={num_envs}", "sim_device=" + device, "rl_device=" + device]
    words += ["pipeline=" + ("cpu" if device == "cpu" else "gpu"), "headless=True", *overrides]
    GlobalHydra.instance().clear()  # inside another Hydra application ``make`` would use that one's task
    with initialize_config_dir(config_dir=folder):
        config = compose("config", overrides=words)
    given: dict = {"task": task, "num_envs": num_envs, "sim_device": device, "rl_device": device, "cfg": config}
    return isaacgymenvs.make(seed=0, headless=True, force_render=False, **given)


class IsaacGymVec:
    """``VecTask`` as a ``pql.contract.env.VecEnv``.

    Args:
        task: the simulator.
        name, timing: the task's name and reset timing; see :func:`isaacgym`.
    """

    def __init__(self, task: Any, name: str, timing: str, random_lengths: bool = False):
        self.task, self.timing, self.random_lengths = task, timing, random_lengths
        self.limit = int(task.max_episode_length) - (2 if timing == "pre" else 1)  # rows of an episode
        obs = {"policy": ObsSpec((task.num_obs,))}
        if task.num_states > 0:
            obs["critic"] = ObsSpec((task.num_states,))
        ends: dict = {"same": ("same_step", "never"), "manual": ("same_step", "on_done")}
        facts = (task.num_envs, obs, Box(task.num_actions), _device(task), self.limit)
        fixed: dict = {"single_instance": True, "deterministic": False, "stream": "default"}
        fixed["info"] = {"random_lengths": random_lengths}
        self.spec = EnvSpec(name, *facts, *ends.get(timing, ("next_step", "always")), **fixed)
        self.ended: Any = None  # [N] bool: the simulator's reset flags of the last row, filler or not
        if hasattr(task, "get_env_state"):
            self.progress, self.load_progress = self._progress, self._load_progress

    def reset(self, seed: int | None = None) -> dict:
        """Begin new episodes, by a step with zero actions. ``seed`` seeds torch's global generator, among others."""
        task = self.task
        if seed is not None:
            from isaacgymenvs.utils.utils import set_seed

            set_seed(seed % 2**31)
        task.reset_buf.fill_(1)
        if self.timing == "same":
            task.reset_idx(task.reset_buf.nonzero().flatten())
        if self.timing == "manual":
            obs, _ = task.reset_done()
        else:
            obs, _, reset, _ = task.step(task.zero_actions())
            self.ended = reset != 0
        if self.random_lengths:
            task.progress_buf[:] = task.progress_buf.float().uniform_(0, self.limit).long()
        return self.groups(obs)

    def step(self, action: Any) -> Step:
        task = self.task
        before = task.progress_buf.clone()
        obs, reward, reset, extras = task.step(action.clamp(-1, 1))
        raw, seen, reward = reset != 0, self.groups(obs), reward.clone()  # copied: the simulator overwrites its buffers
        late, final, yes = before + 1 >= self.limit, dict(seen), raw | ~raw
        if self.timing in ("post", "pre"):
            filler, self.ended = self.ended, raw
            ends, late = raw & ~filler, extras["time_outs"] != 0
            return Step(seen, reward, ends & ~late, ends & late, filler, final, yes, ~filler, {})
        if self.timing == "manual":
            late = extras["terminate"] == 0
            seen = self.groups(task.reset_done()[0])
        return Step(seen, reward, raw & ~late, raw & late, raw, final, ~raw if self.timing == "same" else yes, yes, {})

    def _progress(self) -> dict:
        """Return the steps so far, and what the task's adaptive curriculum is at (the success tolerance of Kuka)."""
        return {"control_steps": int(self.task.control_steps), **(self.task.get_env_state() or {})}

    def _load_progress(self, progress: Any) -> None:
        own = {name: value for name, value in progress.items() if name != "control_steps"}
        self.task.control_steps = int(progress.get("control_steps", 0))
        if own:
            self.task.set_env_state(own)

    def groups(self, obs: Any) -> dict:
        """Copy observations under pql's group names. Raises ``ConfigError`` if they are not one array (Dextreme)."""
        names = {"policy": "obs", "critic": "states"}
        if "obs" not in obs:
            raise ConfigError("task", self.spec.name, "a task whose observations are one array, not " + ", ".join(obs))
        return {ours: obs[names[ours]].float().clone() for ours in self.spec.obs}

    def close(self) -> None:
        """Do nothing: the simulator can only end with the process."""


def _device(task: Any) -> Any:
    import torch

    return torch.device(task.rl_device)
