"""Isaac Gym's tasks, through IsaacGymEnvs 1.5: ``task=isaacgym task.kwargs.task=Ant task.process.python=...``.

Isaac Gym needs Python 3.8 or older, must be imported before torch, and holds one simulation per process for ever: so it
runs in a process of its own (``process.py``). This file runs there, in that Python.

What a step does with episodes that have ended depends on the task (``timing``):

post    they are reset in the next step, after its physics: that row is a filler, and shows the next episode's first
        observation (Ant, Humanoid, Anymal, Cartpole, Franka ...)
pre     the same before its physics: the filler has simulated one step under the old action (the hands, Kuka, Ball
        Balance, Trifinger, Ingenuity, Quadcopter, Factory, IndustReal)
same    in the same step: the final observation is lost, and the simulator's flag for the time limit never set, so the
        limit is told by counting (AnymalTerrain)
manual  by ``reset_done`` before the next step (HumanoidAMP)

``reset`` of the simulator resets nothing and returns zeros: a step with zero actions comes first, and is not shown.
An episode has ``max_episode_length - 1`` rows, under ``pre`` one less. A fall in an episode's last row cannot be told
from the time limit. Its own log holds numbers of single resets, and is left alone.
"""

from __future__ import annotations

import os
from typing import Any

from pql.contract.plain import Box, ConfigError, EnvSpec, ObsSpec, Step

TIMINGS = ("post", "pre", "same", "manual")
LOCKSTEP = ("Factory", "IndustReal")  # all of whose environments begin and end together
PRE = ("ShadowHand", "AllegroHand", "AllegroKuka", "BallBalance", "Trifinger", "Ingenuity", "Quadcopter", *LOCKSTEP)


def isaacgym(
    num_envs: int = 4096,
    device: Any = "cuda:0",
    task: str = "Ant",
    overrides: Any = (),
    timing: str | None = None,
    random_lengths: bool = False,
) -> IsaacGymVec:
    """A task of IsaacGymEnvs.

    Args:
        num_envs: N.
        device: of the physics and the tensors.
        task: its name there.
        overrides: words for that package's own configuration, ``task.env.episodeLength=500``.
        timing: of its resets; None: as known for the task.
        random_lengths: first episodes begin at random places, so that their limits do not come all at once.
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
    """The package's ``VecTask``, from its own configuration. No window, no rendering."""
    import isaacgym  # noqa: F401  before torch, or it refuses
    import isaacgymenvs
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    folder = os.path.join(os.path.dirname(os.path.abspath(isaacgymenvs.__file__)), "cfg")
    if not os.path.exists(os.path.join(folder, "task", task + ".yaml")):
        known = sorted(name[: -len(".yaml")] for name in os.listdir(os.path.join(folder, "task")))
        raise ConfigError("task", task, "one of " + ", ".join(known))
    words = [
        "task=" + task,
        f"num_envs={num_envs}",
        "sim_device=" + device,
        "rl_device=" + device,
        "pipeline=" + ("cpu" if device == "cpu" else "gpu"),
        "headless=True",
        *overrides,
    ]
    GlobalHydra.instance().clear()  # under another Hydra application ``make`` would take that one's task
    with initialize_config_dir(config_dir=folder):
        config = compose("config", overrides=words)
    return isaacgymenvs.make(
        seed=0,
        task=task,
        num_envs=num_envs,
        sim_device=device,
        rl_device=device,
        headless=True,
        force_render=False,
        cfg=config,
    )


class IsaacGymVec:
    """A ``VecTask`` with the contract of ``pql.contract.env.VecEnv``.

    Args:
        task: the simulator.
        name, timing: of it; see :func:`isaacgym`.
    """

    def __init__(self, task: Any, name: str, timing: str, random_lengths: bool = False):
        self.task, self.timing, self.random_lengths = task, timing, random_lengths
        self.limit = int(task.max_episode_length) - (2 if timing == "pre" else 1)  # rows of an episode
        obs = {"policy": ObsSpec((task.num_obs,))}
        if task.num_states > 0:
            obs["critic"] = ObsSpec((task.num_states,))
        ends: dict = {"same": ("same_step", "never"), "manual": ("same_step", "on_done")}
        autoreset, final_obs = ends.get(timing, ("next_step", "always"))
        self.spec = EnvSpec(
            name,
            task.num_envs,
            obs,
            Box(task.num_actions),
            _device(task),
            max_episode_steps=self.limit,
            autoreset=autoreset,
            final_obs=final_obs,
            single_instance=True,
            deterministic=False,
            stream="default",
        )
        self.ended: Any = None  # [N] bool: what the simulator said in the last row, filler or not

    def reset(self, seed: int | None = None) -> dict:
        """Begin new episodes, by a step with zero actions. ``seed`` seeds torch's global generator, and others."""
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
        raw, seen, reward = reset != 0, self.groups(obs), reward.clone()  # they are buffers that it writes to again
        late, final, yes = before + 1 >= self.limit, dict(seen), raw | ~raw
        if self.timing in ("post", "pre"):
            filler, self.ended = self.ended, raw
            ends, late = raw & ~filler, extras["time_outs"] != 0
            return Step(seen, reward, ends & ~late, ends & late, filler, final, yes, ~filler, {})
        if self.timing == "manual":
            late = extras["terminate"] == 0
            seen = self.groups(task.reset_done()[0])
        return Step(seen, reward, raw & ~late, raw & late, raw, final, ~raw if self.timing == "same" else yes, yes, {})

    def groups(self, obs: Any) -> dict:
        """Copies of its observations by our names. Raises ``ConfigError`` where they are not one array (Dextreme)."""
        names = {"policy": "obs", "critic": "states"}
        if "obs" not in obs:
            raise ConfigError("task", self.spec.name, "a task whose observations are one array, not " + ", ".join(obs))
        return {ours: obs[names[ours]].float().clone() for ours in self.spec.obs}

    def close(self) -> None:
        """It has no way to end but with the process."""


def _device(task: Any) -> Any:
    import torch

    return torch.device(task.rl_device)
