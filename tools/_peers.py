"""The contenders of ``bench_peers.py``: their settings, and one training run of each.

Settings are plain JSON and stored with each result. ``theirs`` are the libraries' own:

* Stable-Baselines3's PPO: rl-baselines3-zoo, hyperparams/ppo.yml (HalfCheetah-v4, Hopper-v4, Walker2d-v4: found for one
  environment, 512 steps a rollout and a million steps). With 64 environments x 64 steps a rollout is ``SCALE`` = 8
  times as large, so minibatches and learning rate grow eightfold (the linear rule, Goyal et al. 2017) and the number of
  updates per rollout is unchanged.
* rsl_rl: Isaac Lab's configuration of its Ant (manager-based, rsl_rl_ppo_cfg.py), on 256 environments with 64-64
  networks and rsl_rl's observation normalisation. One change: the value loss is not clipped, since rewards there are
  scaled so that values are of order 1, while returns here reach thousands, which values clipped at 0.2 could not
  follow.
* TD3 and SAC: ``_peers_off_policy.py``.

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

import _peers_off_policy as off_policy
import numpy as np
import torch
from _course import FOREVER, Act, Course, Settings
from _peers_rl_games import train_rl_games
from _peers_skrl import train_skrl
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

SCALE = 8

ZOO = {
    "halfcheetah": {
        "batch_size": 64,
        "learning_rate": 2.0633e-05,
        "gamma": 0.98,
        "gae_lambda": 0.92,
        "clip_range": 0.1,
        "n_epochs": 20,
        "ent_coef": 0.000401762,
        "vf_coef": 0.58096,
        "max_grad_norm": 0.8,
    },
    "hopper": {
        "batch_size": 32,
        "learning_rate": 9.80828e-05,
        "gamma": 0.999,
        "gae_lambda": 0.99,
        "clip_range": 0.2,
        "n_epochs": 5,
        "ent_coef": 0.00229519,
        "vf_coef": 0.835671,
        "max_grad_norm": 0.7,
    },
    "walker2d": {
        "batch_size": 32,
        "learning_rate": 5.05041e-05,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.1,
        "n_epochs": 20,
        "ent_coef": 0.000585045,
        "vf_coef": 0.871923,
        "max_grad_norm": 1.0,
    },
}
WIDE = {"net_arch": [256, 256], "activation": "relu", "log_std_init": -2.0, "ortho_init": False}
ZOO_NETWORKS = {"halfcheetah": WIDE, "hopper": WIDE, "walker2d": {}}  # {}: the library's 64-64 tanh


# -- settings ------------------------------------------------------------------------------------------------------


def sb3_theirs(task: str) -> Settings:
    """rl-baselines3-zoo's settings on 64 environments; other tasks use Walker2d's."""
    zoo = ZOO.get(task, ZOO["walker2d"])
    wider = {"batch_size": zoo["batch_size"] * SCALE, "learning_rate": zoo["learning_rate"] * SCALE, "n_steps": 64}
    return {
        "num_envs": 64,
        "class": "PPO",
        "normalize": True,
        "model": {**zoo, **wider},
        "policy": ZOO_NETWORKS.get(task, {}),
    }


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
    """Our PPO's sizes in rsl_rl's names."""
    config, theirs = compose([f"task={task}", "algo=ppo", "device=cpu"]), rsl_rl_theirs(task)
    algo = ppo = own(config, PpoConfig)
    algorithm = {
        "clip_param": ppo.clip,
        "gamma": algo.gamma,
        "entropy_coef": ppo.entropy_coef,
        "lam": ppo.gae_lambda,
        "num_learning_epochs": ppo.epochs,
        "num_mini_batches": ppo.minibatches,
        "learning_rate": algo.policy.lr,
        "schedule": "adaptive" if ppo.lr_schedule == "adaptive" else "fixed",
        "desired_kl": ppo.kl_target,
        "max_grad_norm": algo.policy.grad_clip or 1e9,
        "value_loss_coef": ppo.value_coef,
    }
    noise = {**theirs["actor"]["distribution_cfg"], "init_std": ppo.init_std}
    sizes = {w: {"hidden_dims": list(n.hidden), "activation": n.activation} for w, n in _networks(config).items()}
    return {
        **theirs,
        "num_envs": config.num_envs,
        "num_steps_per_env": ppo.horizon,
        "algorithm": {**theirs["algorithm"], **algorithm},
        "actor": {**theirs["actor"], **sizes["pi"], "distribution_cfg": noise},
        "critic": {**theirs["critic"], **sizes["vf"]},
    }


def sb3_ours(task: str) -> Settings:
    """Our PPO's sizes in Stable-Baselines3's names. It has no adaptive learning rate, so our initial one is kept."""
    config = compose([f"task={task}", "algo=ppo", "device=cpu"])
    algo = ppo = own(config, PpoConfig)
    model = {
        "n_steps": ppo.horizon,
        "batch_size": config.num_envs * ppo.horizon // ppo.minibatches,
        "n_epochs": ppo.epochs,
        "learning_rate": algo.policy.lr,
        "gamma": algo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": ppo.clip,
        "ent_coef": ppo.entropy_coef,
        "vf_coef": ppo.value_coef,
        "max_grad_norm": algo.policy.grad_clip or 1e9,
    }
    arch = {name: list(net.hidden) for name, net in _networks(config).items()}
    init = float(torch.tensor(ppo.init_std).log())
    policy = {"net_arch": arch, "activation": algo.policy.activation, "log_std_init": init}
    return {"num_envs": config.num_envs, "class": "PPO", "normalize": True, "model": model, "policy": policy}


def _networks(config: Any) -> dict[str, Any]:
    return {"pi": config.algo.policy, "vf": config.algo.critic}


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
    words = [
        f"task={task}",
        f"algo={name}",
        *changes,
        "device=cpu",
        "eval.every_seconds=null",
        "eval.final=false",
        "checkpoint.every_seconds=null",
        "checkpoint.replay=false",
        "logger=none",
    ]
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


def _sb3(settings: Callable[[str], Settings]) -> Contender:
    return Contender(settings, train_sb3, "stable-baselines3")


def _sbx(settings: Callable[[str], Settings]) -> Contender:
    return Contender(settings, train_sb3, "sbx-rl")


CONTENDERS = {
    "rsl_rl:ppo": Contender(rsl_rl_theirs, train_rsl_rl, "rsl-rl-lib"),
    "rsl_rl:ppo-ours": Contender(rsl_rl_ours, train_rsl_rl, "rsl-rl-lib"),
    "sb3:ppo": _sb3(sb3_theirs),
    "sb3:ppo-ours": _sb3(sb3_ours),
    "sb3:sac": _sb3(off_policy.sb3_sac),
    "sb3:sac-ours": _sb3(off_policy.sb3_sac_ours),
    "sb3:td3": _sb3(off_policy.sb3_td3),
    "sb3:td3-ours": _sb3(off_policy.sb3_td3_ours),
    "sbx:sac": _sbx(off_policy.sbx_sac),
    "sbx:sac-ours": _sbx(off_policy.sbx_sac_ours),
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
