"""The contenders of ``bench_peers.py``: their settings, and one training run of each.

Settings are plain JSON and stored with each result. ``theirs`` are the libraries' own:

* Stable-Baselines3: rl-baselines3-zoo, hyperparams/ppo.yml (HalfCheetah-v4, Hopper-v4, Walker2d-v4: found for one
  environment, 512 steps a rollout and a million steps). With 64 environments x 64 steps a rollout is ``SCALE`` = 8
  times as large, so minibatches and learning rate grow eightfold (the linear rule, Goyal et al. 2017) and the number of
  updates per rollout is unchanged. SAC and TD3: the library's defaults with the zoo's ``learning_starts`` and
  action noise, on ``OFF_POLICY_ENVS`` environments with 8 updates a step.
* rsl_rl: Isaac Lab's configuration of its Ant (manager-based, rsl_rl_ppo_cfg.py), on 256 environments with 64-64
  networks and rsl_rl's observation normalisation. One change: the value loss is not clipped, since rewards there are
  scaled so that values are of order 1, while returns here reach thousands, which values clipped at 0.2 could not
  follow.

``ours`` are the network, rollout and update sizes of this library's ``algo=ppo``, read from its presets.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pql
from pql.config import Config, PpoConfig, leaves
from pql.config.compose import compose
from pql.config.families import own
from pql.types import Obs

Settings = dict[str, Any]
SCALE, OFF_POLICY_ENVS = 8, 32

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


@dataclass(frozen=True)
class Budget:
    """Budget of a run: seconds of training, or env steps, which take precedence."""

    seconds: float
    env_steps: int | None = None

    def spent(self, seconds: float, env_steps: int) -> bool:
        return seconds >= self.seconds if self.env_steps is None else env_steps >= self.env_steps


@dataclass(frozen=True)
class Trained:
    """Result of a run: the deterministic policy (obs by group [N, D] -> action [N, A]), its time and its env steps."""

    policy: Callable[[Obs], Tensor]
    seconds: float
    env_steps: int


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


def sb3_off_policy(name: str, task: str) -> Settings:
    noise = {"noise": 0.1} if name == "TD3" else {}
    model = {"learning_starts": 10_000, "train_freq": 1, "gradient_steps": 8, "buffer_size": 1_000_000}
    return {"num_envs": OFF_POLICY_ENVS, "class": name, "normalize": False, "model": model, "policy": {}, **noise}


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
    """Our unchanged preset, and its differences from the schema's defaults, so that results record changes of it."""
    words = [
        f"task={task}",
        f"algo={algo}",
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


def train_pql(task: str, seed: int, budget: Budget, settings: Settings) -> Trained:
    """Train with the command line. The random warm-up counts, in seconds and in steps."""
    limits = {"seconds": budget.seconds, "env_steps": "null"}
    if budget.env_steps is not None:
        limits = {"seconds": "null", "env_steps": budget.env_steps}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [*settings["words"], f"seed={seed}", *(f"budget.{k}={v}" for k, v in limits.items())]
        words.append(f"run_dir={run_dir}")
        done = subprocess.run([sys.executable, "-m", "pql", "train", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])
        summary = json.loads((run_dir / "summary.json").read_text())
        return Trained(pql.load_policy(run_dir), summary["seconds"], summary["env_steps"])


def train_rsl_rl(task: str, seed: int, budget: Budget, settings: Settings) -> Trained:
    from rsl_rl.runners import OnPolicyRunner

    torch.manual_seed(seed)
    env = pql.wrap.rsl_rl(pql.make_env(task, num_envs=settings["num_envs"]), seed=seed)
    config = {k: v for k, v in settings.items() if k != "num_envs"}
    with contextlib.redirect_stdout(io.StringIO()):  # rsl_rl prints its networks
        runner = OnPolicyRunner(env, config, log_dir=None, device="cpu")
    steps, took, start = 0, 0.0, time.perf_counter()
    while not budget.spent(took, steps):
        runner.learn(1, init_at_random_ep_len=steps == 0)  # as its own training scripts do
        steps += settings["num_steps_per_env"] * settings["num_envs"]
        took = time.perf_counter() - start
    return Trained(runner.get_inference_policy("cpu"), took, steps)


def train_sb3(task: str, seed: int, budget: Budget, settings: Settings) -> Trained:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    class Clock(BaseCallback):
        """Callback that ends the run, since Stable-Baselines3 has no time budget."""

        def _on_training_start(self) -> None:
            self.start = time.perf_counter()

        def _on_step(self) -> bool:
            return not budget.spent(time.perf_counter() - self.start, self.num_timesteps)

    model_settings = dict(settings["model"])
    env = pql.wrap.sb3(pql.make_env(task, num_envs=settings["num_envs"]))
    seen = VecNormalize(env, gamma=model_settings["gamma"]) if settings["normalize"] else None
    if "noise" in settings:
        still = np.zeros(env.action_space.shape or (), np.float32)
        model_settings["action_noise"] = NormalActionNoise(still, still + np.float32(0.1))
    policy = dict(settings["policy"])
    if "activation" in policy:
        kinds = {"relu": torch.nn.ReLU, "elu": torch.nn.ELU, "silu": torch.nn.SiLU, "tanh": torch.nn.Tanh}
        policy["activation_fn"] = kinds[policy.pop("activation")]
    cls = getattr(stable_baselines3, settings["class"])
    model = cls("MlpPolicy", seen or env, seed=seed, device="cpu", policy_kwargs=policy, **model_settings)
    clock = Clock()
    model.learn(10**12, callback=clock)
    took = time.perf_counter() - clock.start

    def act(obs: Obs) -> Tensor:
        raw = obs["policy"].numpy()
        known = raw if seen is None else seen.normalize_obs(raw)
        return torch.from_numpy(model.predict(known, deterministic=True)[0])

    return Trained(act, took, model.num_timesteps)


@dataclass(frozen=True)
class Contender:
    """A contender: ``settings(task)`` and the function that trains with them."""

    settings: Callable[[str], Settings]
    train: Callable[[str, int, Budget, Settings], Trained]


CONTENDERS = {
    "pql:ppo": Contender(lambda task: pql_settings("ppo", task), train_pql),
    "pql:pql": Contender(lambda task: pql_settings("pql", task), train_pql),
    "rsl_rl:ppo": Contender(rsl_rl_theirs, train_rsl_rl),
    "rsl_rl:ppo-ours": Contender(rsl_rl_ours, train_rsl_rl),
    "sb3:ppo": Contender(sb3_theirs, train_sb3),
    "sb3:ppo-ours": Contender(sb3_ours, train_sb3),
    "sb3:sac": Contender(lambda task: sb3_off_policy("SAC", task), train_sb3),
    "sb3:td3": Contender(lambda task: sb3_off_policy("TD3", task), train_sb3),
}
DEFAULT = ("pql:ppo", "pql:pql", "rsl_rl:ppo", "rsl_rl:ppo-ours", "sb3:ppo", "sb3:ppo-ours")
os.environ.setdefault(
    "GIT_PYTHON_REFRESH", "quiet"
)  # rsl_rl's logger imports GitPython, which fails without git otherwise
