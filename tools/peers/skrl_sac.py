"""skrl in ``compare.py``: its SAC on environments of this library."""

import contextlib
import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn

import pql
from pql.contract.env import Box, VecEnv
from pql.types import Obs
from pql.wrap.rows import SameStep
from tools.peers.course import FOREVER, Act, Course, Over
from tools.peers.settings import Settings


class SkrlEnv:
    """A ``VecEnv`` with the members of skrl's wrappers that its trainers read.

    ``step`` returns the next episode's observation where an episode ended; ``infos["final_obs"]`` [N, D] holds the
    successors of the actions everywhere.
    """

    state_space = None

    def __init__(self, env: VecEnv, seed: int):
        from pql.wrap.to_gymnasium import action_space, box

        self._rows, self._seed = SameStep(env), seed
        self.num_envs, self.device = env.spec.num_envs, env.spec.device
        self.sizes = env.spec.obs["policy"].shape[0], cast(Box, env.spec.action).size
        self.observation_space, self.action_space = box(env.spec.obs["policy"]), action_space(env.spec)

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """Restart all environments: ([N, D], {})."""
        return self._rows.reset(self._seed)["policy"], {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Step with actions [N, A]; return (observations [N, D], rewards, terminated, truncated [N, 1], infos)."""
        row = self._rows.step(actions)
        obs, terminated = row.obs["policy"], row.done & ~row.time_out
        final = torch.where(row.done[:, None], row.final_obs["policy"], obs)
        return obs, row.reward[:, None], terminated[:, None], row.time_out[:, None], {"final_obs": final}

    def state(self) -> None:
        """Return None: there are no privileged observations."""


def skrl_trainer(env: VecEnv, seed: int, settings: Settings, course: Course | None = None) -> tuple[Any, Act]:
    """Build skrl's sequential trainer of SAC, without logs and checkpoints, and its deterministic policy.

    Args:
        course: counts the steps, and ends training with :class:`Over`.
    """
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils import set_seed

    set_seed(seed)
    wrapped = SkrlEnv(env, seed)
    agent = skrl_agent(wrapped, settings)
    tick = agent.post_interaction

    @torch.no_grad()
    def act(obs: Obs) -> Tensor:
        known = agent._observation_preprocessor(obs["policy"])
        return cast(Tensor, agent.policy.compute({"observations": known}, "policy")[0])

    def post_interaction(*, timestep: int, timesteps: int) -> None:
        tick(timestep=timestep, timesteps=timesteps)
        if course and course.over((timestep + 1) * wrapped.num_envs, agent.updates, act):
            raise Over

    agent.post_interaction = post_interaction
    steps = {"timesteps": FOREVER, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    return SequentialTrainer(env=wrapped, agents=agent, cfg=steps), act


def skrl_agent(env: SkrlEnv, settings: Settings) -> Any:
    """Build skrl's SAC, which counts its ``updates``.

    The agent stores the true successor where an episode ended; with skrl's own vector environments it would store the
    next episode's first observation and bootstrap from it at time limits.
    """
    from skrl.agents.torch.sac import SAC
    from skrl.memories.torch import RandomMemory
    from skrl.resources.preprocessors.torch import RunningStandardScaler

    class Agent(SAC):
        updates = 0

        def record_transition(self, **row: Any) -> None:
            super().record_transition(**row | {"next_observations": row["infos"]["final_obs"]})

        def update(self, *, timestep: int, timesteps: int) -> None:
            super().update(timestep=timestep, timesteps=timesteps)
            self.updates += self.cfg.gradient_steps

    scale, scaler = settings["reward_scale"], {}
    if settings["normalize"]:
        options = {"size": env.observation_space, "device": "cpu"}
        scaler = {"observation_preprocessor": RunningStandardScaler, "observation_preprocessor_kwargs": options}
    return Agent(
        models=skrl_models(env, settings),
        memory=RandomMemory(num_envs=env.num_envs, device="cpu", **settings["memory"]),
        device="cpu",
        cfg={
            **settings["agent"],
            **scaler,
            "rewards_shaper": lambda rewards, timestep, timesteps: rewards * scale,
            "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        },
        observation_space=env.observation_space,
        action_space=env.action_space,
    )


def skrl_models(env: SkrlEnv, settings: Settings) -> dict[str, Any]:
    """Return SAC's five networks as skrl's example builds them: tanh on the mean, one deviation for all states."""
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    obs, size = env.sizes
    low, high = settings["log_std_bounds"]
    hidden = {"relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "tanh": nn.Tanh}[settings["activation"]]

    def mlp(sizes: list[int]) -> nn.Sequential:
        layers = [(nn.Linear(a, b), hidden()) for a, b in itertools.pairwise(sizes[:-1])]
        return nn.Sequential(*(part for layer in layers for part in layer), nn.Linear(sizes[-2], sizes[-1]))

    class Policy(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, device="cpu", **spaces)
            GaussianMixin.__init__(self, clip_log_std=True, min_log_std=low, max_log_std=high)
            self.net = nn.Sequential(mlp([obs, *settings["units"]["policy"], size]), nn.Tanh())
            self.log_std = nn.Parameter(torch.zeros(size))

        def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

        def random_act(self, inputs: dict[str, Tensor], *, role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
            # skrl's own repeats one draw at every step: gymnasium copies a space's generator into the batch of spaces
            return torch.rand(len(inputs["observations"]), size) * 2 - 1, {}

    class Critic(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, device="cpu", **spaces)
            DeterministicMixin.__init__(self)
            self.net = mlp([obs + size, *settings["units"]["critic"], 1])

        def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(torch.cat([inputs["observations"], inputs["taken_actions"]], 1)), {}

    names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
    return {"policy": Policy(), **{name: Critic() for name in names}}


def train_skrl(task: str, seed: int, course: Course, settings: Settings) -> None:
    env = pql.make_env(task, num_envs=settings["num_envs"])
    trainer, _ = skrl_trainer(env, seed, settings, course)
    course.begin()
    with contextlib.suppress(Over):
        trainer.train()
