"""Settings of the off-policy contenders of ``compare.py``.

``theirs``, on ``ENVS`` environments unless the source says otherwise:

* Stable-Baselines3 and sbx (the same on JAX): the library's defaults with rl-baselines3-zoo's 10,000 random steps, and
  its action noise of 0.1 for TD3. Both are made for one update per transition, so a step of all environments is
  followed by as many updates.
* rl_games: its package's configs/mujoco/sac_halfcheetah_envpool.yaml, which its Ant shares: one update per transition.
* skrl: its repository's examples/isaaclab/torch_ant_direct_sac.py: 64 environments, one update of 4,096 transitions per
  step of all. The example gives its observation scaler to the privileged states, of which it has none; here it scales
  observations.

``ours`` are the number of environments, networks, batch, updates per step, learning rates, gamma, tau, random steps and
replay size of our preset of the same algorithm, and what else the library has a setting for: observation normalisation
(all), reward scale (rl_games, skrl), initial temperature (all), its learning rate (rl_games, skrl), a separate learning
rate of the policy (sbx, rl_games, skrl), fewer policy updates (TD3, sbx, rl_games), noise (TD3).
"""

from pql.config import Config, DdpgConfig, SacConfig
from pql.config.algorithms import ActorCriticConfig
from pql.config.compose import compose
from pql.config.families import own
from tools.peers.course import Settings

ENVS, CAPACITY = 32, 1_000_000


def sb3_sac(task: str) -> Settings:
    """Stable-Baselines3's SAC with its own settings."""
    return {"num_envs": ENVS, "class": "SAC", "normalize": False, "model": _sb3_model(), "policy": {}}


def sb3_td3(task: str) -> Settings:
    """Stable-Baselines3's TD3 with its own settings."""
    return {**sb3_sac(task), "class": "TD3", "noise": 0.1}


def sbx_sac(task: str) -> Settings:
    """sbx's SAC with its own settings."""
    return {**sb3_sac(task), "library": "sbx"}


def _sb3_model() -> Settings:
    return {"learning_starts": 10_000, "train_freq": 1, "gradient_steps": ENVS, "buffer_size": CAPACITY}


def _sb3_ours(config: Config) -> Settings:
    algo = own(config, ActorCriticConfig)
    model = {
        "learning_starts": algo.warmup_steps * config.num_envs,
        "train_freq": 1,
        "gradient_steps": updates_per_step(config),
        "buffer_size": config.replay.capacity,
        "batch_size": algo.batch_size,
        "learning_rate": algo.critic.lr,  # one for both networks
        "gamma": algo.gamma,
        "tau": algo.critic.tau,
    }
    arch = {"pi": list(algo.policy.hidden), "qf": list(algo.critic.hidden)}
    policy = {"net_arch": arch, "activation": algo.policy.activation}
    normalize = "obs" if algo.normalize_obs else False
    return {"num_envs": config.num_envs, "normalize": normalize, "model": model, "policy": policy}


def sb3_sac_ours(task: str) -> Settings:
    """Our SAC's sizes in Stable-Baselines3's names: it updates the policy as often as the critic."""
    config = our("sac", task)
    found = _sb3_ours(config)
    found["model"]["ent_coef"] = f"auto_{own(config, SacConfig).alpha}"
    return {**found, "class": "SAC"}


def sbx_sac_ours(task: str) -> Settings:
    """Our SAC's sizes in sbx's names."""
    algo = own(our("sac", task), SacConfig)
    found = sb3_sac_ours(task)
    rates = {"learning_rate": algo.policy.lr, "qf_learning_rate": algo.critic.lr}
    found["model"] |= {**rates, "policy_delay": round(1 / algo.p_per_v)}
    return {**found, "library": "sbx"}


def sb3_td3_ours(task: str) -> Settings:
    """Our TD3's sizes in Stable-Baselines3's names."""
    config = our("td3", task)
    algo, found = own(config, DdpgConfig), _sb3_ours(config)
    found["model"] |= {
        "policy_delay": round(1 / algo.p_per_v),
        "target_policy_noise": algo.smoothing,
        "target_noise_clip": algo.smoothing_clip,
    }
    return {**found, "class": "TD3", "noise": algo.explore.high}


def rl_games_sac(task: str) -> Settings:
    """rl_games' SAC with its own settings."""
    return {
        "units": [256, 256],
        "activation": "relu",
        "log_std_bounds": [-5, 2],
        "config": {
            "num_actors": ENVS,
            "normalize_input": True,
            "reward_shaper": {"scale_value": 1.0},
            "num_steps_per_episode": 1,
            "gamma": 0.99,
            "init_alpha": 1.0,
            "alpha_lr": 3e-4,
            "actor_lr": 3e-4,
            "critic_lr": 1e-3,
            "critic_tau": 5e-3,
            "batch_size": 256,
            "learnable_temperature": True,
            "num_updates_per_step": 32,
            "policy_frequency": 2,
            "num_warmup_frames": 5_000,
            "replay_buffer_size": CAPACITY,
        },
    }


def rl_games_sac_ours(task: str) -> Settings:
    """Our SAC's sizes in rl_games' names; actor and critic have the actor's."""
    config, theirs = our("sac", task), rl_games_sac(task)
    algo = own(config, SacConfig)
    ours = {
        "num_actors": config.num_envs,
        "normalize_input": algo.normalize_obs,
        "reward_shaper": {"scale_value": reward_scale(config)},
        "gamma": algo.gamma,
        "init_alpha": algo.alpha,
        "alpha_lr": algo.alpha_lr,
        "actor_lr": algo.policy.lr,
        "critic_lr": algo.critic.lr,
        "critic_tau": algo.critic.tau,
        "critic_grad_clip": algo.critic.grad_clip or 0,
        "batch_size": algo.batch_size,
        "num_updates_per_step": updates_per_step(config),
        "policy_frequency": round(1 / algo.p_per_v),
        "num_warmup_frames": algo.warmup_steps * config.num_envs,
        "replay_buffer_size": config.replay.capacity,
    }
    return {
        "units": list(algo.policy.hidden),
        "activation": algo.policy.activation,
        "log_std_bounds": [algo.policy.log_std_min, algo.policy.log_std_max],
        "config": {**theirs["config"], **ours},
    }


def skrl_sac(task: str) -> Settings:
    """skrl's SAC with its own settings."""
    return {
        "num_envs": 64,
        "units": {"policy": [512, 256], "critic": [512, 256]},
        "activation": "relu",
        "log_std_bounds": [-5, 2],
        "normalize": True,
        "reward_scale": 1.0,
        "memory": {"memory_size": 16_000, "replacement": False},
        "agent": {
            "gradient_steps": 1,
            "batch_size": 4096,
            "discount_factor": 0.99,
            "polyak": 0.005,
            "learning_rate": [5e-4, 5e-4, 5e-4],  # policy, critic, temperature
            "random_timesteps": 50,
            "learning_starts": 50,
            "initial_entropy_value": 1.0,
        },
    }


def skrl_sac_ours(task: str) -> Settings:
    """Our SAC's sizes in skrl's names: it updates the policy as often as the critic."""
    config = our("sac", task)
    algo = own(config, SacConfig)
    return {
        "num_envs": config.num_envs,
        "units": {"policy": list(algo.policy.hidden), "critic": list(algo.critic.hidden)},
        "activation": algo.policy.activation,
        "log_std_bounds": [algo.policy.log_std_min, algo.policy.log_std_max],
        "normalize": algo.normalize_obs,
        "reward_scale": reward_scale(config),
        "memory": {"memory_size": config.replay.capacity // config.num_envs, "replacement": True},
        "agent": {
            "gradient_steps": updates_per_step(config),
            "batch_size": algo.batch_size,
            "discount_factor": algo.gamma,
            "polyak": algo.critic.tau,
            "learning_rate": [algo.policy.lr, algo.critic.lr, algo.alpha_lr],
            "random_timesteps": algo.warmup_steps,
            "learning_starts": algo.warmup_steps,
            "initial_entropy_value": algo.alpha,
        },
    }


def our(algo: str, task: str) -> Config:
    """Return our preset for two CPU cores."""
    return compose([f"task={task}", f"algo={algo}", "device=cpu"])


def updates_per_step(config: Config) -> int:
    """Return critic updates per step of all environments; the peers take only integers, from 1."""
    return max(1, round(own(config, ActorCriticConfig).v_per_step))


def reward_scale(config: Config) -> float:
    """Return the factor of the rewards that the learner sees."""
    return config.task.reward_scale * config.algo.reward_scale
