"""Settings of the contenders of ``compare.py``: plain JSON, stored with each result.

``theirs`` are the libraries' own, with their sources in ``theirs.yaml``. ``ours`` are the network, rollout and update
sizes of this library's presets of the same algorithm on two CPU cores, in the other library's names. Off-policy these
are the number of environments, networks, batch, updates per step, learning rates, gamma, tau, random steps and replay
size, and what else the library has a setting for: observation normalisation (all), reward scale (rl_games, skrl),
initial temperature (all), its learning rate (rl_games, skrl), a separate learning rate of the policy (sbx, rl_games,
skrl), fewer policy updates (TD3, sbx, rl_games), noise (TD3).
"""

import copy
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from pql.config import AlgoConfig, Config, DdpgConfig, PpoConfig, SacConfig, leaves
from pql.config.algorithms import ActorCriticConfig
from pql.config.compose import compose
from pql.config.families import own
from pql.errors import ConfigError

Settings = dict[str, Any]
SCALE = 8  # of a rollout, relative to the zoo's
THEIRS = yaml.safe_load(Path(__file__).with_name("theirs.yaml").read_text())


def theirs(name: str, task: str) -> Settings:
    """Return the own settings of contender ``name``."""
    found: Settings = copy.deepcopy(THEIRS[name])
    if name != "sb3:ppo":
        return found
    zoo = found[task if task in found else "walker2d"]
    zoo["model"] |= {key: zoo["model"][key] * SCALE for key in ("batch_size", "learning_rate")} | {"n_steps": 64}
    return {"num_envs": 64, "class": "PPO", "normalize": True, **zoo}


def our(algo: str, task: str) -> Config:
    """Return our preset for two CPU cores."""
    return compose([f"task={task}", f"algo={algo}", "device=cpu"])


def named(algo: AlgoConfig, names: str) -> Settings:
    """Return settings of ``algo`` under other names: ``"their_name=our.name ..."``."""
    pairs = (word.partition("=") for word in names.split())
    return {key: attrgetter(path)(algo) for key, _, path in pairs}


def rsl_rl_ppo(config: Config) -> Settings:
    found, ppo = theirs("rsl_rl:ppo", config.task.name), own(config, PpoConfig)
    found["algorithm"] |= named(ppo, "clip_param=clip gamma=gamma entropy_coef=entropy_coef lam=gae_lambda")
    found["algorithm"] |= named(ppo, "num_learning_epochs=epochs num_mini_batches=minibatches desired_kl=kl_target")
    found["algorithm"] |= named(ppo, "learning_rate=policy.lr value_loss_coef=value_coef")
    found["algorithm"]["schedule"] = "adaptive" if ppo.lr_schedule == "adaptive" else "fixed"
    found["algorithm"]["max_grad_norm"] = ppo.policy.grad_clip or 1e9
    for name, net in (("actor", ppo.policy), ("critic", ppo.critic)):
        found[name] = {**found[name], "hidden_dims": list(net.hidden), "activation": net.activation}
    found["actor"]["distribution_cfg"]["init_std"] = ppo.init_std
    return {**found, "num_envs": config.num_envs, "num_steps_per_env": ppo.horizon}


def sb3_ppo(config: Config) -> Settings:
    """Stable-Baselines3 has no adaptive learning rate, so our initial one is kept."""
    ppo = own(config, PpoConfig)
    model = named(ppo, "n_steps=horizon n_epochs=epochs learning_rate=policy.lr gamma=gamma gae_lambda=gae_lambda")
    model |= named(ppo, "clip_range=clip ent_coef=entropy_coef vf_coef=value_coef")
    model["batch_size"] = config.num_envs * ppo.horizon // ppo.minibatches
    model["max_grad_norm"] = ppo.policy.grad_clip or 1e9
    arch = {"pi": list(ppo.policy.hidden), "vf": list(ppo.critic.hidden)}
    init = float(torch.tensor(ppo.init_std).log())
    policy = {"net_arch": arch, "activation": ppo.policy.activation, "log_std_init": init}
    return {"num_envs": config.num_envs, "class": "PPO", "normalize": True, "model": model, "policy": policy}


def updates_per_step(config: Config) -> int:
    """Return critic updates per step of all environments; the peers take only integers, from 1."""
    return max(1, round(own(config, ActorCriticConfig).v_per_step))


def reward_scale(config: Config) -> float:
    """Return the factor of the rewards that the learner sees."""
    return config.task.reward_scale * config.algo.reward_scale


def sb3_off_policy(config: Config) -> Settings:
    algo = own(config, ActorCriticConfig)
    model = {"learning_starts": algo.warmup_steps * config.num_envs, "train_freq": 1}
    model |= {"gradient_steps": updates_per_step(config), "buffer_size": config.replay.capacity}
    model |= named(algo, "batch_size=batch_size learning_rate=critic.lr gamma=gamma tau=critic.tau")  # a rate for both
    arch = {"pi": list(algo.policy.hidden), "qf": list(algo.critic.hidden)}
    policy = {"net_arch": arch, "activation": algo.policy.activation}
    normalize = "obs" if algo.normalize_obs else False
    return {"num_envs": config.num_envs, "normalize": normalize, "model": model, "policy": policy}


def sb3_sac(config: Config) -> Settings:
    """Stable-Baselines3 updates the policy as often as the critic."""
    found = sb3_off_policy(config)
    found["model"]["ent_coef"] = f"auto_{own(config, SacConfig).alpha}"
    return {**found, "class": "SAC"}


def sbx_sac(config: Config) -> Settings:
    algo, found = own(config, SacConfig), sb3_sac(config)
    found["model"] |= named(algo, "learning_rate=policy.lr qf_learning_rate=critic.lr")
    found["model"]["policy_delay"] = round(1 / algo.p_per_v)
    return {**found, "library": "sbx"}


def sb3_td3(config: Config) -> Settings:
    algo, found = own(config, DdpgConfig), sb3_off_policy(config)
    found["model"] |= named(algo, "target_policy_noise=smoothing target_noise_clip=smoothing_clip")
    found["model"]["policy_delay"] = round(1 / algo.p_per_v)
    return {**found, "class": "TD3", "noise": algo.explore.high}


def rl_games_sac(config: Config) -> Settings:
    """Actor and critic have the actor's network."""
    found, algo = theirs("rl_games:sac", config.task.name), own(config, SacConfig)
    ours = named(algo, "normalize_input=normalize_obs gamma=gamma init_alpha=alpha alpha_lr=alpha_lr")
    ours |= named(algo, "actor_lr=policy.lr critic_lr=critic.lr critic_tau=critic.tau batch_size=batch_size")
    ours |= {"critic_grad_clip": algo.critic.grad_clip or 0, "policy_frequency": round(1 / algo.p_per_v)}
    ours |= {"num_actors": config.num_envs, "num_warmup_frames": algo.warmup_steps * config.num_envs}
    ours |= {"num_updates_per_step": updates_per_step(config), "replay_buffer_size": config.replay.capacity}
    found["config"] |= {**ours, "reward_shaper": {"scale_value": reward_scale(config)}}
    found |= named(algo, "units=policy.hidden activation=policy.activation")
    return {**found, "log_std_bounds": [algo.policy.log_std_min, algo.policy.log_std_max]}


def skrl_sac(config: Config) -> Settings:
    """Skrl updates the policy as often as the critic."""
    algo = own(config, SacConfig)
    agent = named(algo, "batch_size=batch_size discount_factor=gamma polyak=critic.tau initial_entropy_value=alpha")
    agent |= named(algo, "random_timesteps=warmup_steps learning_starts=warmup_steps")
    agent["learning_rate"] = [algo.policy.lr, algo.critic.lr, algo.alpha_lr]
    rows = config.replay.capacity // config.num_envs
    return {
        "num_envs": config.num_envs,
        "units": {"policy": list(algo.policy.hidden), "critic": list(algo.critic.hidden)},
        "activation": algo.policy.activation,
        "log_std_bounds": [algo.policy.log_std_min, algo.policy.log_std_max],
        "normalize": algo.normalize_obs,
        "reward_scale": reward_scale(config),
        "memory": {"memory_size": rows, "replacement": True},
        "agent": {**agent, "gradient_steps": updates_per_step(config)},
    }


def pql_settings(algo: str, task: str) -> Settings:
    """Return our preset, and its differences from the schema's defaults, so that results record changes of it.

    Args:
        algo: name of the preset, and settings of the algorithm after it: ``pql2 algo.v_per_step=32``.

    Raises:
        ConfigError: another setting: the benchmark has its own.
    """
    name, *changes = algo.split()
    for word in changes:
        if not word.startswith("algo."):
            raise ConfigError("contender", f"pql:{algo}", f"settings of the algorithm (algo.KEY=VALUE), not {word}")
    words = [f"task={task}", f"algo={name}", *changes, "device=cpu", "eval.every_seconds=null", "eval.final=false"]
    words += ["checkpoint.every_seconds=null", "checkpoint.replay=false", "logger=none"]
    config = compose([*words, "budget.seconds=1"])
    defaults = dict(leaves(Config(algo=type(config.algo)())))
    return {"words": words, "config": {k: v for k, v in leaves(config) if v != defaults[k]}}
