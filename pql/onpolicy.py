"""On-policy wiring, IMPALA's too: a collector that fills a rollout, and one learner of policy and value."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.actor_critic import ActorCritic, Body, OwnBody, StateValue, StochasticPolicy
from pql.algos import impala, ppo
from pql.algos.vtrace import Weights
from pql.collect import Collector, action_buffer
from pql.config import Config, RolloutConfig
from pql.dist import ActionDist, Categorical, DiagGaussian
from pql.encoders import custom_network, groups_of, make_encoder
from pql.env import Discrete, EnvSpec, VecEnv
from pql.errors import ConfigError
from pql.machine import available_bytes
from pql.nets import Flat, seeded
from pql.normalize import Normalizer
from pql.optim import AdamW, Optimizer, RMSProp, RMSPropTF
from pql.rollout import Acted, Rollout, Segment, View, rollout_bytes
from pql.schedule import Counts
from pql.types import Memory, Obs
from pql.unrolls import FULL, Reader, Unrolls
from pql.validate import corrected
from pql.wiring import Devices, Family, Role, Wiring, check_obs, make_normalizer, seeds
from pql.worker import Learner


class StochasticActor:
    """A stochastic policy at work: it keeps what it did, beside what the simulator gets."""

    def __init__(self, policy: StochasticPolicy, spec: EnvSpec):
        device = spec.device
        self.policy = policy
        self.action = action_buffer(spec)
        n, size, carry_size = spec.num_envs, policy.dist.params_size, policy.body.carry_size
        self.version = torch.zeros((), dtype=torch.int64, device=device)  # of the weights, which it is pulled with
        versions = torch.full((n,), -1, device=device)  # by environment: some act rarely
        carry = torch.zeros(n, carry_size, device=device)
        # Where answers come late, what was remembered is needed with them.
        before = carry.clone() if spec.spread > 1 else None
        squashes = isinstance(policy.dist, DiagGaussian) and policy.dist.squash
        self.squashed = self.action if squashes else None
        self.acted = Acted(action_buffer(spec), torch.zeros(n, size, device=device), versions, before)
        fresh = torch.ones(n, dtype=torch.bool, device=device)
        self.memory = Memory(carry, fresh) if carry_size else None

    def act(self, obs: Obs, gen: Generator) -> None:
        policy, dist = self.policy, self.policy.dist
        if self.memory is None:
            params = policy(obs)
        else:
            if self.acted.carry is not None:
                self.acted.carry.copy_(self.memory.carry)
            params, carry = policy.step(obs, self.memory.carry)
            self.memory.carry.copy_(carry)
        raw = dist.sample(params, gen)
        self.acted.raw.copy_(raw)
        self.acted.params.copy_(params)
        self.acted.version.copy_(self.version)
        self.action.copy_(dist.action(raw))

    def record(self, device: torch.device) -> Acted:
        return self.acted if device == self.action.device else self.acted.map(lambda t: t.to(device))

    def observe(self, first: Tensor) -> None:
        if self.memory is not None:
            self.memory.carry.mul_(~first.unsqueeze(1))
            self.memory.fresh.copy_(first)

    def restart(self) -> None:
        if self.memory is not None:
            self.memory.carry.zero_()
            self.memory.fresh.fill_(True)

    def part(self, columns: slice) -> "StochasticActor":
        part = copy.copy(self)
        part.action, part.acted = self.action[columns], self.acted.map(lambda t: t[columns])
        part.squashed = None if self.squashed is None else part.action
        part.memory = None if self.memory is None else Memory(*(t[columns] for t in self.memory))
        return part

    def state_dict(self) -> dict[str, Tensor]:
        memory = {} if self.memory is None else self.memory._asdict()
        if self.acted.carry is None:
            return memory
        return {**memory, **{f"acted/{k}": t for k, t in self.acted._asdict().items()}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def rollout_of(config: Config) -> RolloutConfig:
    """The settings of the algorithm at hand that all on rollouts have."""
    return config.algo.impala if config.algo.family == "impala" else config.algo.ppo


def counts(config: Config) -> Counts:
    """A tick is one rollout and every update on it; beside a collector at work, on the rollout before."""
    ppo, horizon = config.algo.ppo, rollout_of(config).horizon
    updates = config.algo.impala.minibatches if config.algo.family == "impala" else ppo.epochs * ppo.minibatches
    return Counts(horizon, {"learner": updates}, 1, horizon if config.algo.schedule == "concurrent" else 0)


def check_spec(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """What an environment and a config must agree on. Returns the rollout's rows T.

    Raises:
        ConfigError: an observation that no network here takes, settings for another kind of action or of observation,
            a rollout that does not fit into memory.
    """
    check_obs(config, spec)
    p, group = rollout_of(config), f"algo.{config.algo.family}"
    if isinstance(spec.action, Discrete) and p.squash:
        raise ConfigError(f"{group}.squash", True, f"false: the actions of {spec.name} are discrete")
    if p.shared and groups_of(config, spec, "critic") != groups_of(config, spec, "policy"):
        raise ConfigError(f"{group}.shared", True, f"false: in {spec.name} the critic has observations of its own")
    size = make_dist(config, spec).params_size
    parts = 1 + FULL if apart(config, spec) else 2 if counts.ahead else 1
    check_room(f"{group}.horizon", p.horizon, spec, size, device, parts)
    return p.horizon


def check_room(
    setting: str, horizon: int, spec: EnvSpec, params_size: int, device: torch.device, parts: int = 1
) -> None:  # fmt: skip
    """Raises ``ConfigError`` for ``setting`` where a rollout of ``horizon`` rows does not fit into memory."""
    # The segment (or several), its normalised copy, and as much again for a minibatch and its activations.
    need, free = (2 + parts) * rollout_bytes(spec, horizon, params_size), available_bytes(device)
    if need > free:
        raise ConfigError(
            setting, horizon,
            f"at most about {max(1, horizon * free // need)} with num_envs={spec.num_envs}: this takes "
            f"{need / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free",
        )  # fmt: skip


def wire(config: Config, env: VecEnv, counts: Counts, rows: int, devices: Devices, capture: bool) -> Wiring:
    """The rollout, its collector and its learner."""
    spec, seed, home = env.spec, seeds(config.seed), devices["learner"]
    net = seeded(partial(make_network, config, spec), seed["init"])
    actor = StochasticActor(copy.deepcopy(net.policy).to(spec.device), spec)
    norm = make_normalizer(config, spec, devices["collector"])
    source = make_source(config, spec, norm, net, rows, 2 if counts.ahead else 1, home)
    gens = {w: Generator(devices[w]).manual_seed(seed[s]) for w, s in (("learner", "v"), ("collector", "collector"))}
    collector = Collector(env, actor, norm, [source.store], gens["collector"], capture)
    flat = Flat(net.to(home), trained=True)
    learner = make_learner(config, spec, flat, source, gens["learner"])
    now = cast(ppo.PpoState, learner.state).progress
    size = sum(p.numel() for p in net.policy.parameters())  # the policy's parameters come first
    full, seen = ({"rollout": t} if t else {} for t in (source.full, source.seen))
    roles = {
        "learner": Role(pulls=seen, owns={"policy": [flat.data[:size], now.ticks]}, learner=learner),
        "collector": Role(pulls={"policy": [Flat(actor.policy).data, actor.version]}, owns=full),
    }
    return Wiring(collector, roles, net.policy, {"rollout/bootstrap_lost": now.lost})


@dataclass(frozen=True)
class Source:
    """Where rows are kept, and a learner's way to them.

    Attributes:
        read: what a tick is learned from.
        full, seen: what the collector publishes of the store, and the learner's copies.
        reader: how far the learner has read, where that is not a matter of ticks.
    """

    store: Rollout | Unrolls
    read: Callable[[], Segment]
    full: list[Tensor]
    seen: list[Tensor]
    reader: Reader | None = None


def make_source(
    config: Config, spec: EnvSpec, norm: Normalizer, net: ActorCritic, rows: int, halves: int, device: torch.device
) -> Source:  # fmt: skip
    """A rollout in ``halves``, or unrolls of each environment's own where they may answer late."""
    sizes = (rows, net.policy.dist.params_size, device, net.policy.body.carry_size)
    if apart(config, spec):
        unrolls = Unrolls(spec, norm, *sizes)
        reader = Reader(unrolls)
        return Source(unrolls, reader.segment, unrolls.tensors(), reader.tensors(), reader)
    rollout, view = Rollout(spec, norm, *sizes, halves), View(norm, device)
    if halves == 1:
        return Source(rollout, rollout.segment, [], [])
    return Source(rollout, partial(rollout.segment, view), rollout.sealed.tensors(), view.tensors())


def apart(config: Config, spec: EnvSpec) -> bool:
    """Whether each environment fills unrolls at a pace of its own.

    Several policies act in such an unroll, which V-trace corrects; and a learner reads those of one environment in
    order, but not one in each tick, so that no memory of the value's own could run through them.
    """
    own = rollout_of(config)
    return spec.spread > 1 and corrected(config.algo) and (own.lstm is None or own.shared)


def make_learner(config: Config, spec: EnvSpec, flat: Flat, source: Source, gen: Generator) -> Learner:
    """One learner of policy and value."""
    optimizer = make_optimizer(config, flat)
    module: Any = impala if config.algo.family == "impala" else ppo
    settings: Any = make_impala_settings(config, spec) if module is impala else make_settings(config, spec)
    normalize = module is ppo and config.algo.ppo.normalize_value
    state = ppo.make_state(flat, optimizer, normalize, spec.num_envs)
    state.reader = source.reader

    def draw(count: int, gen: Generator) -> Iterable[Any]:
        return module.draw(state, settings, source.read(), gen)

    return Learner(
        "learner", state, module.update, draw, settings, gen, trains=("v", "p"), clock=state.progress.ticks
    )  # fmt: skip


def make_dist(config: Config, spec: EnvSpec) -> ActionDist:
    """Gaussian for continuous actions, categorical for discrete ones."""
    if isinstance(spec.action, Discrete):
        return Categorical(spec.action.n)
    return DiagGaussian(spec.action.size, rollout_of(config).squash)


def make_body(config: Config, spec: EnvSpec, which: str) -> Body | OwnBody:
    """Hidden layers of the "policy", or of the "critic" on the observations that it may see; or a network by name."""
    net = config.algo.policy if which == "policy" else config.algo.critic
    if net.net is not None:
        return OwnBody(custom_network(config, spec, which), spec.obs)
    encoder, group = make_encoder(config, spec, which), groups_of(config, spec, which)[0]
    size = spec.obs[group].shape[0] if encoder is None else encoder.size
    return Body(group, size, net.hidden, net.activation, net.layer_norm, rollout_of(config).lstm, encoder)


def make_policy(config: Config, spec: EnvSpec, amp: bool = False) -> StochasticPolicy:
    """The policy network alone, freshly initialised. What is evaluated, loaded or exported computes in float32."""
    body, dist = make_body(config, spec, "policy"), make_dist(config, spec)
    return StochasticPolicy(body, dist, rollout_of(config).init_std, amp)


def make_network(config: Config, spec: EnvSpec) -> ActorCritic:
    """Policy and value, freshly initialised."""
    policy = make_policy(config, spec, rollout_of(config).amp)
    body = None if rollout_of(config).shared else make_body(config, spec, "critic")
    return ActorCritic(policy, StateValue(body, (body or policy.body).size))


def make_optimizer(config: Config, flat: Flat) -> Optimizer:
    """One for both networks; the policy's settings."""
    net, name = config.algo.policy, rollout_of(config).optimizer
    if name != "adam":
        kind = RMSProp if name == "rmsprop" else RMSPropTF
        return kind(flat, net.lr, net.grad_clip, eps=net.eps)
    return AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps)


def make_settings(config: Config, spec: EnvSpec) -> ppo.Settings:
    algo, p = config.algo, config.algo.ppo
    return ppo.Settings(
        epochs=p.epochs, minibatches=p.minibatches, gamma=algo.gamma, gae_lambda=p.gae_lambda, clip=p.clip,
        value_clip=p.value_clip, value_coef=p.value_coef, entropy_coef=p.entropy_coef,
        normalize_advantage=p.normalize_advantage, lr=algo.policy.lr,
        kl_target=p.kl_target if p.lr_schedule == "adaptive" else None, kl_stop=p.kl_stop,
        anneal_steps=p.anneal_steps, anneal_clip=p.anneal_clip, steps_per_tick=p.horizon * spec.num_envs,
        vtrace=make_weights(config) if p.vtrace else None,
    )  # fmt: skip


def make_impala_settings(config: Config, spec: EnvSpec) -> impala.Settings:
    algo, p = config.algo, config.algo.impala
    return impala.Settings(
        minibatches=p.minibatches, gamma=algo.gamma, trace_lambda=p.trace_lambda, weights=make_weights(config),
        correction=p.correction, summed=p.reduce == "sum", value_coef=p.value_coef, entropy_coef=p.entropy_coef,
        kl_coef=p.kl_coef, lr=algo.policy.lr, anneal_steps=p.anneal_steps, steps_per_tick=p.horizon * spec.num_envs,
    )  # fmt: skip


def make_weights(config: Config) -> Weights:
    v = config.algo.vtrace
    return Weights(v.rho_bar, v.c_bar, v.pg_rho_bar)


ROLLOUT = Family(("learner",), counts, check_spec, wire, make_policy)
