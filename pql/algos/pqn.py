"""PQN: Q-learning on fresh rollouts of many environments, without replay and without a target network.

Source: Gallici et al. 2024, "Simplifying Deep Temporal Difference Learning". Layer normalisation keeps values stable,
Q(lambda) returns propagate rewards, and every rollout is used for a few epochs and then discarded.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import make_normalizer
from pql.algos.on_policy import begin_rollout_tick, check_room, on_policy_counts
from pql.algos.registry import Family, Setup, Wiring
from pql.algos.value import check_acting, make_q_network
from pql.collect.actors import Actor, action_buffer
from pql.collect.collector import Collector
from pql.collect.epsilon import Epsilon, epsilon_greedy
from pql.config import Config, PqnConfig
from pql.contract.env import Discrete, EnvSpec
from pql.data.returns import lambda_returns, valued_rows
from pql.data.rollout import PolicyOutput, Progress, Rollout, Segment, by_parts, minibatches
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Optimizer, RAdam, make_adamw
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, State, Tensors, Update
from pql.nets.actor_critic import bfloat16
from pql.nets.mlp import seeded
from pql.nets.q import QNetwork
from pql.types import Metrics, Obs


@dataclass
class PqnState(State):
    """State of the learner. The action-value network is the policy."""

    policy: Flat
    optimizer: Optimizer
    progress: Progress

    @property
    def net(self) -> QNetwork:
        return cast(QNetwork, self.policy.module)


def rollout_values(net: QNetwork, obs: Obs, amp: bool) -> Tensor:
    """Return Q(s, a), [..., n] float32; with ``amp`` it is computed in bfloat16, both for acting and for targets."""
    with bfloat16(amp, next(iter(obs.values()))):
        return net.values(obs).float()


class GreedyActor(Actor):
    """Epsilon-greedy actor that stores the network's values of all actions, from which returns are computed.

    Args:
        amp: see :func:`rollout_values`.
    """

    def __init__(self, policy: nn.Module, epsilon: Epsilon, spec: EnvSpec, amp: bool = False):
        self.policy, self.epsilon, self.amp = policy, epsilon, amp
        self.action, n = action_buffer(spec), spec.num_envs
        values = torch.zeros(n, cast(Discrete, spec.action).n, device=spec.device)
        self.acted = PolicyOutput(self.action, values, torch.zeros(n, dtype=torch.int64, device=spec.device))

    def act(self, obs: Obs, gen: Generator) -> None:
        q = rollout_values(cast(QNetwork, self.policy), obs, self.amp)
        self.acted.params.copy_(q)
        self.action.copy_(epsilon_greedy(q, self.epsilon(), gen))

    def record(self, device: torch.device) -> PolicyOutput:
        return self.acted if device == self.action.device else self.acted.map(lambda t: t.to(device))

    def part(self, columns: slice) -> Self:
        part = super().part(columns)
        part.epsilon = self.epsilon.part(columns)
        part.acted = self.acted.map(lambda t: t[columns])._replace(raw=part.action)
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self.epsilon.steps}


@dataclass(frozen=True)
class ValueRollout:
    """The functions that define a value-based algorithm on rollouts.

    Attributes:
        settings: class of ``config.algo``.
        draw: (state, segment, settings, gen) -> minibatches of a tick.
        update: (state, minibatch, settings, gen) -> metrics.
    """

    settings: type[PqnConfig]
    draw: Callable[[Any, Segment, Any, Generator], Iterable[Any]]
    update: Update[Any, Any, Any]

    def family(self) -> Family[PqnConfig]:
        """Return the entry for the algorithm registry."""
        return Family(self.settings, on_policy_counts, check_pqn, partial(wire_pqn, self), make_q_network)


def check_pqn(config: Config[PqnConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the rollout's rows T.

    Raises:
        ConfigError: continuous actions, an unsupported observation, or a rollout that does not fit into memory.
    """
    check_acting(config, spec)
    horizon = config.algo.horizon
    check_room("algo.horizon", horizon, spec, cast(Discrete, spec.action).n, device)
    return horizon


def wire_pqn(kind: ValueRollout, setup: Setup[PqnConfig]) -> Wiring:
    """Create the rollout, its collector and its learner."""
    config, spec, home, p = setup.config, setup.spec, setup.devices["learner"], setup.config.algo
    net = seeded(partial(make_q_network, config, spec), setup.init_seed)
    epsilon = Epsilon(p.epsilon, spec.num_envs, spec.device)
    actor = GreedyActor(copy.deepcopy(net).to(spec.device), epsilon, spec, p.amp)
    norm = make_normalizer(setup)
    rollout = Rollout(spec, norm, setup.rows, cast(Discrete, spec.action).n, home)
    collector = Collector(setup.env, actor, norm, [rollout], setup.generator("collector"), setup.execution)
    flat = Flat(net.to(home), trained=True)
    state = PqnState(flat, make_pqn_optimizer(config, flat), Progress(home, p.horizon * spec.num_envs))

    def draw(count: int, gen: Generator) -> Iterable[Any]:
        return kind.draw(state, rollout.segment(), p, gen)

    gen = setup.generator("learner", "v")
    publishes: Tensors = {"policy": [flat.data]}
    learner = Learner("learner", state, kind.update, p, draw, gen, {}, publishes, trains=("v", "p"))
    gauges = {"rollout/bootstrap_lost": state.progress.lost, "explore/epsilon": epsilon.mean}
    return Wiring(collector, {"policy": [Flat(actor.policy).data]}, {}, [learner], flat, gauges)


def make_pqn_optimizer(config: Config[PqnConfig], flat: Flat) -> Optimizer:
    """Create the network's optimiser."""
    algo = config.algo
    return make_adamw(flat, algo.critic, RAdam if algo.optimizer == "radam" else AdamW)


class ValueMinibatch(NamedTuple):
    """Rows [B] of a segment."""

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B] int64
    target: Tensor  # [B] Q(lambda) return
    mask: Tensor  # [B] 0 or 1


def draw_pqn(state: PqnState, segment: Segment, settings: PqnConfig, gen: Generator) -> Iterator[ValueMinibatch]:
    """Yield a tick's minibatches: compute targets once, then shuffle all rows in each epoch."""
    rates = ((state.optimizer, settings.critic.lr),)
    begin_rollout_tick(state.progress, segment, settings.anneal_steps, rates)
    rows = {"action": segment.action, "target": returns(state, segment, settings), "mask": segment.mask}
    count = segment.mask.shape[0]
    columns = {**rows, **{f"obs/{k}": v[:count] for k, v in segment.obs.items()}}
    flat = {k: v.flatten(0, 1) for k, v in columns.items()}
    for part in minibatches(flat, settings.epochs, settings.minibatches, 0, gen):
        obs = {k: part[f"obs/{k}"] for k in segment.obs}
        yield ValueMinibatch(obs, part["action"], part["target"], part["mask"])


@torch.no_grad()
def returns(state: PqnState, segment: Segment, settings: PqnConfig) -> Tensor:
    """Return R_t = r_t + discount_t ((1 - lambda) max_a Q(s'_t, a) + lambda R_{t+1}), [T, N].

    At the end of a trajectory R_{t+1} is max_a Q(s'_t, a) (Gallici et al. 2024, section 4: Peng's Q(lambda)). Values of
    the rows are those stored when acting (``segment.params``). The network has not changed since, so it is evaluated
    only on the observations after the last row and on final ones.
    """
    rows = segment.mask.shape[0]
    rest = {k: v[rows:] for k, v in segment.obs.items()}
    beyond = by_parts(lambda obs: rollout_values(state.net, obs, settings.amp).amax(-1), rest, rows)
    value = torch.cat((segment.params.amax(-1), beyond))  # [T + 1 + K + 1, N]
    return lambda_returns(valued_rows(segment, settings.gamma, value), settings.q_lambda)


def pqn_update(state: PqnState, batch: ValueMinibatch, settings: PqnConfig, gen: Generator) -> Metrics:
    """Take one step on 0.5 E[(Q(s, a) - R)^2]. Mutates ``state`` only."""
    q = rollout_values(state.net, batch.obs, settings.amp).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    share = batch.mask / batch.mask.sum().clamp(min=1)
    loss = 0.5 * (share * (q - batch.target).square()).sum()
    norm = state.optimizer.minimize(loss, mask=batch.mask)
    with torch.no_grad():
        mean = (share * q).sum()
    return {"loss/critic": loss.detach(), "grad_norm/critic": norm, "value/q": mean, "policy/lr": state.optimizer.lr}


FAMILY = ValueRollout(PqnConfig, draw_pqn, pqn_update).family()
