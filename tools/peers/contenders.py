"""The contenders of ``compare.py``: their settings, and one training run of each.

Settings are plain JSON and stored with each result. ``theirs`` are the libraries' own:

* Stable-Baselines3's PPO: rl-baselines3-zoo, hyperparams/ppo.yml (HalfCheetah-v4, Hopper-v4, Walker2d-v4: found for one
  environment, 512 steps a rollout and a million steps). With 64 environments x 64 steps a rollout is ``SCALE`` = 8
  times as large, so minibatches and learning rate grow eightfold (the linear rule, Goyal et al. 2017) and the number of
  updates per rollout is unchanged.
* rsl_rl: Isaac Lab's configuration of its Ant (manager-based, rsl_rl_ppo_cfg.py), on 256 environments with 64-64
  networks and rsl_rl's observation normalisation. One change: the value loss is not clipped, since rewards there are
  scaled so that values are of order 1, while returns here reach thousands, which values clipped at 0.2 could not
  follow.
* TD3 and SAC: ``off_policy.py``.

``ours`` are the network, rollout and update sizes of this library's presets of the same algorithm.
"""

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
from pql.config import Config, PpoConfig, leaves
from pql.config.compose import compose
from pql.config.families import own
from pql.contract.env import VecEnv
from pql.engine.graph import clone_state
from pql.errors import ConfigError
from pql.run.policy import Policy, snapshot
from pql.types import Obs
from tools.peers import off_policy
from tools.peers.course import FOREVER, Act, Course, Settings
from tools.peers.rl_games_sac import train_rl_games
from tools.peers.skrl_sac import train_skrl

SCALE = 8

ZOO_NAMES = [
    "batch_size",
    "learning_rate",
    "gamma",
    "gae_lambda",
    "clip_range",
    "n_epochs",
    "ent_coef",
    "vf_coef",
    "max_grad_norm",
]
ZOO_VALUES = {
    "halfcheetah": (64, 2.0633e-05, 0.98, 0.92, 0.1, 20, 0.000401762, 0.58096, 0.8),
    "hopper": (32, 9.80828e-05, 0.999, 0.99, 0.2, 5, 0.00229519, 0.835671, 0.7),
    "walker2d": (32, 5.05041e-05, 0.99, 0.95, 0.1, 20, 0.000585045, 0.871923, 1.0),
}
ZOO: dict[str, dict[str, Any]] = {task: dict(zip(ZOO_NAMES, v, strict=True)) for task, v in ZOO_VALUES.items()}
WIDE = {"net_arch": [256, 256], "activation": "relu", "log_std_init": -2.0, "ortho_init": False}
ZOO_NETWORKS = {"halfcheetah": WIDE, "hopper": WIDE, "walker2d": {}}  # {}: the library's 64-64 tanh


# -- settings ------------------------------------------------------------------------------------------------------


def sb3_theirs(task: str) -> Settings:
    """rl-baselines3-zoo's settings on 64 environments; other tasks use Walker2d's."""
    zoo = ZOO.get(task, ZOO["walker2d"])
    wider = {"batch_size": zoo["batch_size"] * SCALE, "learning_rate": zoo["learning_rate"] * SCALE, "n_steps": 64}
    more = {"model": {**zoo, **wider}, "policy": ZOO_NETWORKS.get(task, {})}
    return {"num_envs": 64, "class": "PPO", "normalize": True, **more}


def rsl_rl_theirs(task: str) -> Settings:
    model = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "elu", "obs_normalization": True}
    algorithm = {
        "class_name": "PPO",
        "value_loss_coef": 1.0,
        "use_clipped_value_loss": False,
        "clip_param": 0.2,
        "gamma": 0.99,
        "entropy_coef": 0.0,
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 5e-4,
        "lam": 0.95,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "max_grad_norm": 1.0,
    }
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    return {
        "num_envs": 256,
        "num_steps_per_env": 32,
        "save_interval": 10**9,
        "algorithm": algorithm,
        "actor": {**model, "distribution_cfg": noise},
        "critic": model,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    }


def rsl_rl_ours(task: str) -> Settings:
    return rsl_rl_sizes(our_ppo(task))


def rsl_rl_sizes(config: Config) -> Settings:
    """Return our PPO's sizes in rsl_rl's names."""
    theirs, ppo = rsl_rl_theirs(config.task.name), own(config, PpoConfig)
    algorithm = {
        "clip_param": ppo.clip,
        "gamma": ppo.gamma,
        "entropy_coef": ppo.entropy_coef,
        "lam": ppo.gae_lambda,
        "num_learning_epochs": ppo.epochs,
        "num_mini_batches": ppo.minibatches,
        "learning_rate": ppo.policy.lr,
        "schedule": "adaptive" if ppo.lr_schedule == "adaptive" else "fixed",
        "desired_kl": ppo.kl_target,
        "max_grad_norm": ppo.policy.grad_clip or 1e9,
        "value_loss_coef": ppo.value_coef,
    }
    actor, critic = (
        {**theirs[name], "hidden_dims": list(net.hidden), "activation": net.activation}
        for name, net in (("actor", ppo.policy), ("critic", ppo.critic))
    )
    noise = {**theirs["actor"]["distribution_cfg"], "init_std": ppo.init_std}
    found = {"algorithm": {**theirs["algorithm"], **algorithm}, "actor": {**actor, "distribution_cfg": noise}}
    return {**theirs, "num_envs": config.num_envs, "num_steps_per_env": ppo.horizon, **found, "critic": critic}


def sb3_ours(task: str) -> Settings:
    """Our PPO's sizes in Stable-Baselines3's names. It has no adaptive learning rate, so our initial one is kept."""
    config = our_ppo(task)
    ppo = own(config, PpoConfig)
    model = {
        "n_steps": ppo.horizon,
        "batch_size": config.num_envs * ppo.horizon // ppo.minibatches,
        "n_epochs": ppo.epochs,
        "learning_rate": ppo.policy.lr,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": ppo.clip,
        "ent_coef": ppo.entropy_coef,
        "vf_coef": ppo.value_coef,
        "max_grad_norm": ppo.policy.grad_clip or 1e9,
    }
    arch = {"pi": list(ppo.policy.hidden), "vf": list(ppo.critic.hidden)}
    init = float(torch.tensor(ppo.init_std).log())
    policy = {"net_arch": arch, "activation": ppo.policy.activation, "log_std_init": init}
    return {"num_envs": config.num_envs, "class": "PPO", "normalize": True, "model": model, "policy": policy}


def our_ppo(task: str) -> Config:
    return compose([f"task={task}", "algo=ppo", "device=cpu"])


def pql_settings(algo: str, task: str) -> Settings:
    """Our preset, and its differences from the schema's defaults, so that results record changes of it.

    Args:
        algo: name of the preset, and settings of the algorithm after it: ``pql2 algo.v_per_step=32``.

    Raises:
        ConfigError: another setting: the benchmark has its own.
    """
    name, _, rest = algo.partition(" ")
    changes = rest.split()
    for word in changes:
        if not word.startswith("algo."):
            raise ConfigError("contender", f"pql:{algo}", f"settings of the algorithm (algo.KEY=VALUE), not {word}")
    words = [f"task={task}", f"algo={name}", *changes, "device=cpu", "eval.every_seconds=null", "eval.final=false"]
    words += ["checkpoint.every_seconds=null", "checkpoint.replay=false", "logger=none"]
    config = compose([*words, "budget.seconds=1"])
    defaults = dict(leaves(Config(algo=type(config.algo)())))
    return {"words": words, "config": {k: v for k, v in leaves(config) if v != defaults[k]}}


# -- training ------------------------------------------------------------------------------------------------------


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


def _sb3(settings: Callable[[str], Settings], package: str = "stable-baselines3") -> Contender:
    return Contender(settings, train_sb3, package)


CONTENDERS = {
    "rsl_rl:ppo": Contender(rsl_rl_theirs, train_rsl_rl, "rsl-rl-lib"),
    "rsl_rl:ppo-ours": Contender(rsl_rl_ours, train_rsl_rl, "rsl-rl-lib"),
    "sb3:ppo": _sb3(sb3_theirs),
    "sb3:ppo-ours": _sb3(sb3_ours),
    "sb3:sac": _sb3(off_policy.sb3_sac),
    "sb3:sac-ours": _sb3(off_policy.sb3_sac_ours),
    "sb3:td3": _sb3(off_policy.sb3_td3),
    "sb3:td3-ours": _sb3(off_policy.sb3_td3_ours),
    "sbx:sac": _sb3(off_policy.sbx_sac, "sbx-rl"),
    "sbx:sac-ours": _sb3(off_policy.sbx_sac_ours, "sbx-rl"),
    "rl_games:sac": Contender(off_policy.rl_games_sac, train_rl_games, "rl-games"),
    "rl_games:sac-ours": Contender(off_policy.rl_games_sac_ours, train_rl_games, "rl-games"),
    "skrl:sac": Contender(off_policy.skrl_sac, train_skrl, "skrl"),
    "skrl:sac-ours": Contender(off_policy.skrl_sac_ours, train_skrl, "skrl"),
}
GROUPS = {
    "on-policy": ("pql:ppo", "pql:pql", "rsl_rl:ppo", "rsl_rl:ppo-ours", "sb3:ppo", "sb3:ppo-ours"),
    "off-policy": (
        *("pql:pql", "pql:pql2", "pql:sac", "pql:td3"),
        *(name for name in CONTENDERS if not name.partition(":")[2].startswith("ppo")),
    ),
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
    return CONTENDERS[name]


# rsl_rl's logger imports GitPython, which fails without git otherwise
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
