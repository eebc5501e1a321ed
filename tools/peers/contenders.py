"""The contenders of ``compare.py``: their settings (``settings.py``), and one training run of each."""

import contextlib
import importlib
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import pql
from pql.config import Config
from pql.contract.env import VecEnv
from pql.engine.graph import clone_state
from pql.errors import ConfigError
from pql.run.policy import Policy, snapshot
from pql.types import Obs
from tools.peers import settings
from tools.peers.course import FOREVER, Act, Course
from tools.peers.rl_games_sac import train_rl_games
from tools.peers.settings import Settings, our, pql_settings, theirs
from tools.peers.skrl_sac import train_skrl

# rsl_rl's logger imports GitPython, which fails without git otherwise
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")


def train_pql(task: str, seed: int, course: Course, settings: Settings) -> None:
    """Train as the command line does. The random warm-up counts, in seconds and in steps.

    Policies on the way are copied during training (to within the two seconds of a row of metrics) and evaluated later.
    """
    budget, kept = course.budget, []
    limits: dict[str, Any] = {"seconds": budget.seconds, "env_steps": "null"}
    if budget.env_steps is not None:
        limits = {"seconds": "null", "env_steps": budget.env_steps}

    def keep(session: Any, row: Any) -> None:
        if budget.share(session.seconds, session.env_steps) < 1 and course.due(session.seconds, session.env_steps):
            with session.parts.schedule.executor.exclusive():
                state = clone_state(snapshot(session.parts))
            kept.append(((session.seconds, session.env_steps, session.parts.updates()["v"]), state))

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [*settings["words"], f"seed={seed}", *(f"budget.{k}={v}" for k, v in limits.items())]
        summary = pql.train(*words, f"run_dir={run_dir}", callbacks=keep, quiet=True)
        trained, early = pql.load_policy(run_dir), cast(Policy, pql.load_policy(run_dir))
    for counts, state in kept:
        early.load_state_dict(state)
        course.add(*counts, early)
    course.add(summary.seconds, summary.env_steps, summary.updates_v, trained)


def train_rsl_rl(task: str, seed: int, course: Course, settings: Settings) -> None:
    from rsl_rl.runners import OnPolicyRunner

    torch.manual_seed(seed)
    env = pql.wrap.rsl_rl(pql.make_env(task, num_envs=settings["num_envs"]), seed=seed)
    config = {k: v for k, v in settings.items() if k != "num_envs"}
    with contextlib.redirect_stdout(io.StringIO()):  # rsl_rl prints its networks
        runner = OnPolicyRunner(env, config, log_dir=None, device="cpu")
    per_rollout = settings["algorithm"]["num_learning_epochs"] * settings["algorithm"]["num_mini_batches"]
    rollouts, over = 0, False
    course.begin()
    while not over:
        runner.learn(1, init_at_random_ep_len=rollouts == 0)  # as its own training scripts do
        rollouts += 1
        steps = rollouts * settings["num_steps_per_env"] * settings["num_envs"]
        over = course.over(steps, rollouts * per_rollout, lambda obs: runner.get_inference_policy("cpu")(obs))


def sb3_model(env: VecEnv, seed: int, settings: Settings) -> tuple[Any, Act]:
    """Build a model of Stable-Baselines3, or of sbx, its twin on JAX, and its deterministic policy."""
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    library = importlib.import_module(settings.get("library", "stable_baselines3"))
    model, policy = dict(settings["model"]), dict(settings["policy"])
    wrapped, seen = pql.wrap.sb3(env), None
    if settings["normalize"]:
        seen = VecNormalize(wrapped, gamma=model["gamma"], norm_reward=settings["normalize"] != "obs")
    if "noise" in settings:
        still = np.zeros(wrapped.action_space.shape or (), np.float32)
        model["action_noise"] = NormalActionNoise(still, still + np.float32(settings["noise"]))
    if "activation" in policy:
        policy["activation_fn"] = _activation(policy.pop("activation"), jax=library.__name__ == "sbx")
    cls = getattr(library, settings["class"])
    made = cls("MlpPolicy", seen or wrapped, seed=seed, device="cpu", policy_kwargs=policy, **model)

    def act(obs: Obs) -> Tensor:
        raw = obs["policy"].numpy()
        known = raw if seen is None else seen.normalize_obs(raw)
        return torch.from_numpy(made.predict(known, deterministic=True)[0])

    return made, act


def _activation(name: str, jax: bool) -> Any:
    if jax:
        return getattr(importlib.import_module("flax.linen"), name)
    kinds = {"relu": torch.nn.ReLU, "elu": torch.nn.ELU, "silu": torch.nn.SiLU, "tanh": torch.nn.Tanh}
    return kinds[name]


def train_sb3(task: str, seed: int, course: Course, settings: Settings) -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    env = pql.make_env(task, num_envs=settings["num_envs"])
    model, act = sb3_model(env, seed, settings)
    per_count = 1  # PPO counts epochs
    if settings["class"] == "PPO":
        per_count = -(-settings["num_envs"] * model.n_steps // model.batch_size)

    class Clock(BaseCallback):
        """Callback that ends the run, since Stable-Baselines3 has no time budget."""

        def _on_training_start(self) -> None:
            course.begin()

        def _on_step(self) -> bool:
            return not course.over(self.num_timesteps, model._n_updates * per_count, act)

    model.learn(FOREVER, callback=Clock())


@dataclass(frozen=True)
class Contender:
    """A contender: ``settings(task)``, the function that trains with them, and the package that is compared."""

    settings: Callable[[str], Settings]
    train: Callable[[str, int, Course, Settings], None]
    package: str


LIBRARIES = {
    "rsl_rl": (train_rsl_rl, "rsl-rl-lib"),
    "sb3": (train_sb3, "stable-baselines3"),
    "sbx": (train_sb3, "sbx-rl"),
    "rl_games": (train_rl_games, "rl-games"),
    "skrl": (train_skrl, "skrl"),
}
OURS: dict[str, Callable[[Config], Settings]] = {
    "rsl_rl:ppo": settings.rsl_rl_ppo,
    "sb3:ppo": settings.sb3_ppo,
    "sb3:sac": settings.sb3_sac,
    "sb3:td3": settings.sb3_td3,
    "sbx:sac": settings.sbx_sac,
    "rl_games:sac": settings.rl_games_sac,
    "skrl:sac": settings.skrl_sac,
}
"""Our presets' sizes in the names of each; with them a contender's name ends with ``-ours``."""
CONTENDERS = [name + ending for name in OURS for ending in ("", "-ours")]
GROUPS = {
    "on-policy": ("pql:ppo", "pql:pql", *(name for name in CONTENDERS if ":ppo" in name)),
    "off-policy": ("pql:pql", "pql:pql2", "pql:sac", "pql:td3", *(n for n in CONTENDERS if ":ppo" not in n)),
}


def contender(name: str) -> Contender:
    """Return the contender ``name``: one of ``CONTENDERS``, or ``pql:PRESET``, with settings after it, for ours.

    Raises:
        ConfigError: there is none.
    """
    if name.startswith("pql:"):
        return Contender(partial(pql_settings, name.removeprefix("pql:")), train_pql, "pql-rl")
    if name not in CONTENDERS:
        raise ConfigError("contender", name, f"pql:PRESET or one of {', '.join(CONTENDERS)}")
    library, _, algo = name.removesuffix("-ours").partition(":")
    if not name.endswith("-ours"):
        return Contender(partial(theirs, name), *LIBRARIES[library])
    convert = OURS[f"{library}:{algo}"]
    return Contender(lambda task: convert(our(algo, task)), *LIBRARIES[library])
