"""SAC in one file: this library's environments, replay, networks and update functions, without a session.

    python examples/sac_by_hand.py            # Pendulum, ten seconds: returns above -250 after 12,800 env steps
    python examples/sac_by_hand.py 7          # another seed

`pql train` adds settings and presets, normalised observations, workers that run concurrently, CUDA graphs, logs,
checkpoints that resume with equal bits, and exports.

Shapes: N environments, B rows of a batch, A numbers of an action, E critics.
"""

import copy
import sys

import torch

import pql
from pql.algos.sac import SacCriticState, SacPolicyState, Temperature, sac_policy_update, sac_value_update
from pql.config import SacConfig
from pql.config.networks import CriticConfig, GaussianPolicyConfig
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_adamw
from pql.nets.encoders import make_layers
from pql.nets.mlp import Critic, GaussianPolicy, NetInput

TASK, DEVICE = "pendulum", torch.device("cpu")
NUM_ENVS, STEPS, RANDOM_STEPS = 32, 400, 20  # steps of all environments
ROWS = 1000  # of the replay, with N transitions each
UPDATES_PER_STEP = 4
REWARD_SCALE = 0.1

NET = {"hidden": [64, 64], "activation": "relu", "lr": 1e-3, "grad_clip": None, "weight_decay": 0.0}
SETTINGS = SacConfig(
    batch_size=256,
    n_step=3,
    gamma=0.98,
    alpha=0.1,  # temperature at the start
    critic=CriticConfig(**NET, ensemble=2, tau=0.02),
    policy=GaussianPolicyConfig(**NET),
)


class Agent:
    """Networks, optimisers and temperature, in the states that the update functions change."""

    def __init__(self, spec):
        source, size, net = NetInput("policy", spec.obs["policy"].shape[0]), spec.action.size, SETTINGS.critic
        self.policy = GaussianPolicy(source, size, make_layers(SETTINGS.policy)).to(DEVICE)
        self.critic = Critic(source, size, make_layers(net), net.ensemble).to(DEVICE)
        alpha = Temperature(SETTINGS.alpha).to(DEVICE)
        # A network's parameters as one tensor: a step of AdamW or of the target network is one kernel.
        policy, critic, temperature = (Flat(module, trained=True) for module in (self.policy, self.critic, alpha))
        self.critics = SacCriticState(
            critic=critic,
            target=Flat(copy.deepcopy(self.critic)),
            optimizer=make_adamw(critic, SETTINGS.critic),
            clock=None,
            policy=self.policy,
            atoms=None,  # scalar critics
            log_alpha=alpha.log_alpha,
            temperature=None,  # the policy's update trains it
            temperature_optimizer=None,
            log_slope=None,
        )
        self.improver = SacPolicyState(
            policy=policy,
            optimizer=make_adamw(policy, SETTINGS.policy),
            average=None,
            critic=self.critic,
            atoms=None,
            log_alpha=alpha.log_alpha,
            temperature=temperature,
            temperature_optimizer=AdamW(temperature, SETTINGS.alpha_lr),
            log_slope=None,
        )

    @torch.no_grad()
    def act(self, obs, gen):
        """Sample actions, [N, A] in [-1, 1]."""
        mean, log_std = self.policy(obs)
        return torch.tanh(mean + log_std.exp() * torch.randn(mean.shape, generator=gen, device=DEVICE))

    def learn(self, replay, gen):
        """One update of the critics, then one of policy and temperature. Returns metrics: 0-dim tensors."""
        size = SETTINGS.batch_size
        batch = replay.sample(replay.live, size, SETTINGS.n_step, SETTINGS.gamma, gen)  # n-step windows, [B, ...]
        metrics = sac_value_update(self.critics, batch._replace(reward=batch.reward * REWARD_SCALE), SETTINGS, gen)
        return metrics | sac_policy_update(self.improver, replay.sample_obs(replay.live, size, gen), SETTINGS, gen)


def make_replay(spec):
    """A ring of ROWS x N transitions, with a row for the final observation where an episode ends."""
    fillers = spec.autoreset == "same_step"
    return Replay(ReplayLayout(spec.obs, spec.action.size, spec.num_envs, ROWS, 1 + fillers, fillers), DEVICE)


@torch.no_grad()
def evaluate(agent, seed, episodes=32):
    """Mean return of whole episodes without noise, on environments of their own."""
    env = pql.make_env(TASK, num_envs=episodes, device=DEVICE)
    obs, total = env.reset(seed), torch.zeros(episodes, device=DEVICE)
    running = torch.ones(episodes, dtype=torch.bool, device=DEVICE)
    while running.any():
        step = env.step(agent.policy.mean_action(obs))
        total += step.reward * running
        running &= ~(step.terminated | step.truncated)
        obs = step.obs
    env.close()
    return total.mean().item()


def main(seed=0):
    """Train, and return the mean return of 32 episodes."""
    torch.manual_seed(seed)  # of the networks' first weights
    gen = torch.Generator(DEVICE).manual_seed(seed)
    env = pql.make_env(TASK, num_envs=NUM_ENVS, device=DEVICE)
    agent, replay = Agent(env.spec), make_replay(env.spec)
    obs = env.reset(seed)
    replay.begin(obs)
    for t in range(STEPS):
        if t < RANDOM_STEPS:
            action = 2 * torch.rand(NUM_ENVS, env.spec.action.size, generator=gen, device=DEVICE) - 1
        else:
            action = agent.act(obs, gen)
        step = env.step(action)
        replay.insert(action, step)
        obs = step.obs
        for _ in range(UPDATES_PER_STEP if t >= RANDOM_STEPS else 0):
            metrics = agent.learn(replay, gen)
        if t % 100 == 99:
            shown = ", ".join(f"{name} {value.item():.2f}" for name, value in metrics.items())
            print(f"{(t + 1) * NUM_ENVS:6} env steps: return {evaluate(agent, seed):.0f}, {shown}")
    env.close()
    return evaluate(agent, seed + 1)


if __name__ == "__main__":
    print(f"return {main(*map(int, sys.argv[1:])):.0f}")
