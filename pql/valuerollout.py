"""Value-based wiring on rollouts (PQN): a collector that acts epsilon-greedily, and one learner of action values."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos import pqn
from pql.collect import Collector, action_buffer
from pql.config import Config
from pql.env import Discrete, EnvSpec, VecEnv
from pql.epsilon import Epsilon, epsilon_greedy
from pql.nets import Flat, seeded
from pql.onpolicy import check_room
from pql.optim import AdamW, Optimizer, RAdam
from pql.qnets import QNetwork
from pql.rollout import Acted, Progress, Rollout
from pql.schedule import Counts
from pql.types import Memory, Obs
from pql.valuebased import check_acting, make_q_network
from pql.wiring import Devices, Family, Role, Wiring, make_normalizer, seeds
from pql.worker import Learner


class GreedyActor:
    """Epsilon-greedy in a network's values, all of which it keeps: returns are made of them.

    Args:
        amp: see :func:`pqn.values`.
    """

    squashed: Tensor | None = None
    memory: Memory | None = None

    def __init__(self, policy: nn.Module, epsilon: Epsilon, spec: EnvSpec, amp: bool = False):
        self.policy, self.epsilon, self.amp = policy, epsilon, amp
        self.action = action_buffer(spec)
        values = torch.zeros(spec.num_envs, cast(Discrete, spec.action).n, device=spec.device)
        self.acted = Acted(self.action, values, torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device))

    def act(self, obs: Obs, gen: Generator) -> None:
        values = pqn.values(cast(QNetwork, self.policy), obs, self.amp)
        self.acted.params.copy_(values)
        self.action.copy_(epsilon_greedy(values, self.epsilon(), gen))

    def record(self, device: torch.device) -> Acted:
        return self.acted if device == self.action.device else self.acted.map(lambda t: t.to(device))

    def observe(self, first: Tensor) -> None:
        """Nothing: epsilon does not depend on episodes."""

    def restart(self) -> None:
        """Nothing is remembered from step to step."""

    def part(self, columns: slice) -> "GreedyActor":
        part = copy.copy(self)
        part.action, part.epsilon = self.action[columns], self.epsilon.part(columns)
        part.acted = self.acted.map(lambda t: t[columns])._replace(raw=part.action)
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self.epsilon.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.epsilon.steps.copy_(state["steps"])


def counts(config: Config) -> Counts:
    """A tick is one rollout and every update on it."""
    p = config.algo.pqn
    return Counts(p.horizon, {"learner": p.epochs * p.minibatches}, 1)


def check_spec(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """What an environment and a config must agree on. Returns the rollout's rows T.

    Raises:
        ConfigError: continuous actions, an observation that no network here takes, a rollout that does not fit into
            memory.
    """
    check_acting(config, spec)
    horizon = config.algo.pqn.horizon
    check_room("algo.pqn.horizon", horizon, spec, cast(Discrete, spec.action).n, device)
    return horizon


def wire(config: Config, env: VecEnv, counts: Counts, rows: int, devices: Devices, capture: bool) -> Wiring:
    """The rollout, its collector and its learner."""
    spec, seed, home, p = env.spec, seeds(config.seed), devices["learner"], config.algo.pqn
    net = seeded(partial(make_q_network, config, spec), seed["init"])
    epsilon = Epsilon(p.epsilon, spec.num_envs, spec.device)
    actor = GreedyActor(copy.deepcopy(net).to(spec.device), epsilon, spec, p.amp)
    norm = make_normalizer(config, spec, devices["collector"])
    rollout = Rollout(spec, norm, rows, cast(Discrete, spec.action).n, home)
    gens = {w: Generator(devices[w]).manual_seed(seed[s]) for w, s in (("learner", "v"), ("collector", "collector"))}
    collector = Collector(env, actor, norm, [rollout], gens["collector"], capture)
    flat = Flat(net.to(home), trained=True)
    state = pqn.PqnState(flat, make_optimizer(config, flat), Progress(home))
    settings = make_settings(config, spec)

    def draw(count: int, gen: Generator) -> Iterable[Any]:
        return pqn.draw(state, settings, rollout.segment(), gen)

    learner = Learner("learner", state, pqn.update, draw, settings, gens["learner"], trains=("v", "p"))
    roles = {
        "learner": Role(pulls={}, owns={"policy": [flat.data]}, learner=learner),
        "collector": Role(pulls={"policy": [Flat(actor.policy).data]}, owns={}),
    }
    gauges = {"rollout/bootstrap_lost": state.progress.lost, "explore/epsilon": epsilon.mean}
    return Wiring(collector, roles, flat, gauges)


def make_optimizer(config: Config, flat: Flat) -> Optimizer:
    net = config.algo.critic
    kind = RAdam if config.algo.pqn.optimizer == "radam" else AdamW
    return kind(flat, net.lr, net.grad_clip, net.weight_decay, net.eps)


def make_settings(config: Config, spec: EnvSpec) -> pqn.Settings:
    p = config.algo.pqn
    return pqn.Settings(
        epochs=p.epochs, minibatches=p.minibatches, gamma=config.algo.gamma, q_lambda=p.q_lambda,
        lr=config.algo.critic.lr, anneal_steps=p.anneal_steps, steps_per_tick=p.horizon * spec.num_envs, amp=p.amp,
    )  # fmt: skip


VALUE_ROLLOUT = Family(("learner",), counts, check_spec, wire, make_q_network)
