"""On-policy wiring: a collector that fills a rollout, and one learner that trains policy and value on it."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from pql.actor_critic import ActorCritic, Body, OwnBody, StateValue, StochasticPolicy
from pql.algos import ppo
from pql.collect import Collector, action_buffer
from pql.config import Config
from pql.dist import ActionDist, Categorical, DiagGaussian
from pql.encoders import custom_network, groups_of, make_encoder
from pql.env import Discrete, EnvSpec, VecEnv
from pql.errors import ConfigError
from pql.machine import available_bytes
from pql.nets import Flat
from pql.optim import AdamW, Optimizer, RMSProp
from pql.rollout import Acted, Rollout, rollout_bytes
from pql.schedule import Counts
from pql.types import Memory, Obs
from pql.wiring import Devices, Family, Role, Wiring, check_obs, make_normalizer, seeds
from pql.worker import Learner


class StochasticActor:
    """A stochastic policy at work: it keeps what it did, beside what the simulator gets."""

    def __init__(self, policy: StochasticPolicy, spec: EnvSpec):
        device = spec.device
        self.policy = policy
        self.action = action_buffer(spec)
        self.acted = Acted(action_buffer(spec), torch.zeros(spec.num_envs, policy.dist.params_size, device=device))
        size = policy.body.carry_size
        self.memory = None
        if size:
            fresh = torch.ones(spec.num_envs, dtype=torch.bool, device=device)
            self.memory = Memory(torch.zeros(spec.num_envs, size, device=device), fresh)

    def act(self, obs: Obs, gen: Generator) -> None:
        policy, dist = self.policy, self.policy.dist
        if self.memory is None:
            params = policy(obs)
        else:
            params, carry = policy.step(obs, self.memory.carry)
            self.memory.carry.copy_(carry)
        raw = dist.sample(params, gen)
        self.acted.raw.copy_(raw)
        self.acted.params.copy_(params)
        self.action.copy_(dist.action(raw))

    def record(self, device: torch.device) -> Acted:
        return self.acted if device == self.action.device else Acted(*(t.to(device) for t in self.acted))

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
        part.action, part.acted = self.action[columns], Acted(*(t[columns] for t in self.acted))
        part.memory = None if self.memory is None else Memory(*(t[columns] for t in self.memory))
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.memory is None else self.memory._asdict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def counts(config: Config) -> Counts:
    """A tick is one rollout and every update on it."""
    p = config.algo.ppo
    return Counts(p.horizon, {"learner": p.epochs * p.minibatches}, 1)


def check_spec(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """What an environment and a config must agree on. Returns the rollout's rows T.

    Raises:
        ConfigError: an observation that no network here takes, settings for another kind of action or of observation,
            a rollout that does not fit into memory.
    """
    check_obs(config, spec)
    p = config.algo.ppo
    if isinstance(spec.action, Discrete) and p.squash:
        raise ConfigError("algo.ppo.squash", True, f"false: the actions of {spec.name} are discrete")
    if p.shared and groups_of(config, spec, "critic") != groups_of(config, spec, "policy"):
        raise ConfigError("algo.ppo.shared", True, f"false: in {spec.name} the critic has observations of its own")
    # The segment, its normalised copy, and as much again for a minibatch and its activations.
    need = 3 * rollout_bytes(spec, p.horizon, make_dist(config, spec).params_size)
    free = available_bytes(device)
    if need > free:
        raise ConfigError(
            "algo.ppo.horizon", p.horizon,
            f"at most about {max(1, p.horizon * free // need)} with num_envs={spec.num_envs}: this takes "
            f"{need / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free",
        )  # fmt: skip
    return p.horizon


def wire(config: Config, env: VecEnv, counts: Counts, rows: int, devices: Devices, capture: bool) -> Wiring:
    """The rollout, its collector and its learner."""
    spec, seed, home = env.spec, seeds(config.seed), devices["learner"]
    net = make_network(config, spec, seed["init"])
    actor = StochasticActor(copy.deepcopy(net.policy).to(spec.device), spec)
    norm = make_normalizer(config, spec, devices["collector"])
    rollout = Rollout(spec, norm, rows, net.policy.dist.params_size, home, net.policy.body.carry_size)
    gens = {w: Generator(devices[w]).manual_seed(seed[s]) for w, s in (("learner", "v"), ("collector", "collector"))}
    collector = Collector(env, actor, norm, [rollout], gens["collector"], capture)
    flat = Flat(net.to(home), trained=True)
    state = ppo.make_state(flat, make_optimizer(config, flat), config.algo.ppo.normalize_value, spec.num_envs)
    settings = make_settings(config, spec)

    def draw(count: int, gen: Generator) -> Iterable[Any]:
        return ppo.draw(state, settings, rollout.segment(), gen)

    gen, clock = gens["learner"], state.progress.ticks
    learner = Learner("learner", state, ppo.update, draw, settings, gen, trains=("v", "p"), clock=clock)
    size = sum(p.numel() for p in net.policy.parameters())  # the policy's parameters come first
    roles = {
        "learner": Role(pulls={}, owns={"policy": [flat.data[:size]]}, learner=learner),
        "collector": Role(pulls={"policy": [Flat(actor.policy).data]}, owns={}),
    }
    return Wiring(collector, roles, net.policy, {"rollout/bootstrap_lost": state.progress.lost})


def make_dist(config: Config, spec: EnvSpec) -> ActionDist:
    """Gaussian for continuous actions, categorical for discrete ones."""
    if isinstance(spec.action, Discrete):
        return Categorical(spec.action.n)
    return DiagGaussian(spec.action.size, config.algo.ppo.squash)


def make_body(config: Config, spec: EnvSpec, which: str) -> Body | OwnBody:
    """Hidden layers of the "policy", or of the "critic" on the observations that it may see; or a network by name."""
    net = config.algo.policy if which == "policy" else config.algo.critic
    if net.net is not None:
        return OwnBody(custom_network(config, spec, which), spec.obs)
    encoder, group = make_encoder(config, spec, which), groups_of(config, spec, which)[0]
    size = spec.obs[group].shape[0] if encoder is None else encoder.size
    return Body(group, size, net.hidden, net.activation, net.layer_norm, config.algo.ppo.lstm, encoder)


def make_policy(config: Config, spec: EnvSpec) -> StochasticPolicy:
    """The policy network alone, freshly initialised."""
    p = config.algo.ppo
    return StochasticPolicy(make_body(config, spec, "policy"), make_dist(config, spec), p.init_std, p.amp)


def make_network(config: Config, spec: EnvSpec, seed: int) -> ActorCritic:
    """Policy and value on the CPU, initialised from ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = make_policy(config, spec)
        body = None if config.algo.ppo.shared else make_body(config, spec, "critic")
        return ActorCritic(policy, StateValue(body, (body or policy.body).size))


def make_optimizer(config: Config, flat: Flat) -> Optimizer:
    """One for both networks; the policy's settings."""
    net = config.algo.policy
    if config.algo.ppo.optimizer == "rmsprop":
        return RMSProp(flat, net.lr, net.grad_clip, eps=net.eps)
    return AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps)


def make_settings(config: Config, spec: EnvSpec) -> ppo.Settings:
    algo, p = config.algo, config.algo.ppo
    return ppo.Settings(
        epochs=p.epochs, minibatches=p.minibatches, gamma=algo.gamma, gae_lambda=p.gae_lambda, clip=p.clip,
        value_clip=p.value_clip, value_coef=p.value_coef, entropy_coef=p.entropy_coef,
        normalize_advantage=p.normalize_advantage, lr=algo.policy.lr,
        kl_target=p.kl_target if p.lr_schedule == "adaptive" else None, kl_stop=p.kl_stop,
        anneal_steps=p.anneal_steps, anneal_clip=p.anneal_clip, steps_per_tick=p.horizon * spec.num_envs,
    )  # fmt: skip


ROLLOUT = Family(("learner",), counts, check_spec, wire, make_policy)
