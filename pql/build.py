"""All wiring, as plain calls: a checked config and an environment become workers under a schedule."""

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos import ddpg, sac
from pql.collect import ActFunction, Collector, NoisyActor
from pql.config import Config
from pql.dist import squashed_gaussian
from pql.encoders import custom_network, groups_of, make_encoder
from pql.env import Box, EnvSpec, VecEnv
from pql.errors import ConfigError
from pql.explore import Exploration
from pql.graph import Graph
from pql.machine import (
    keep_freed_memory,
    make_executor,
    make_inline,
    set_precision,
    thread_counts,
    worker_devices,
)  # fmt: skip
from pql.nets import Critic, DeterministicPolicy, Flat, GaussianPolicy, seeded
from pql.normalize import Normalizer
from pql.onpolicy import ROLLOUT
from pql.optim import AdamW, Clock
from pql.parts import Parts as Parts
from pql.parts import Replica
from pql.recurrent import RECURRENT
from pql.replay import Cursor, Replay
from pql.replicas import Replicas, names, shares
from pql.schedule import Concurrent, Counts, Executor, Inline, Lockstep, Schedule, Threads, Trace, tick_counts
from pql.slots import WeightSlot
from pql.task import build_env as build_env
from pql.task import check_groups, describe_env, telling
from pql.types import Batch, Obs, ObsBatch, split
from pql.valuebased import VALUE
from pql.valuerollout import VALUE_ROLLOUT
from pql.wiring import Devices, Family, Role, Wiring, check_obs, make_normalizer, make_ring, ring_rows
from pql.wiring import seeds as seeds
from pql.worker import Learner, LearnerJob, Worker


def build(
    config: Config, env: VecEnv | None = None, trace: Trace | None = None, executor: Executor | None = None
) -> Parts:
    """Wire a run.

    Args:
        env: a live environment instead of the task's.
        trace, executor: for tests: record the tick; run its workers otherwise than the placement says.
    Raises:
        ConfigError: something cannot work together, before any simulator starts where its spec can be had.
    """
    family = FAMILIES[config.algo.family]
    env = None if env is None else telling(config, env)
    each = shares(config)
    devices = [worker_devices(share, family.learners) for share in each]
    set_precision(config.placement)
    keep_freed_memory()
    if config.cuda_graphs == "on" and not all(Graph.possible(d) for d in devices[0].values()):
        raise ConfigError("cuda_graphs", "on", "auto or off where a worker sits on the CPU")
    counts = family.counts(config)
    home, together = devices[0][family.learners[0]], all(d == devices[0] for d in devices)
    spec = env.spec if env is not None else describe_env(config if together else each[0], devices[0]["collector"])
    rows = 0 if spec is None else _check(config, spec, counts, home, env)
    with ExitStack() as opened:  # what has been started is closed again if a later step fails
        replicas: list[Replica] = []
        for share, places in zip(each, devices, strict=True):
            check = partial(_check, share, counts=counts, home=home, env=None)
            started = env if env is not None else build_env(share, approve=check)
            if env is None:
                opened.callback(started.close)
            rows = rows or _check(share, started.spec, counts, home, env)
            wiring = family.wire(share, started, counts, rows, places, config.cuda_graphs != "off")
            replicas.append(_assemble(share, started, wiring, counts, places, trace, executor))
        schedule = replicas[0].schedule
        if config.algo.schedule == "replicas":
            schedule = Replicas(config, replicas, make_crew(config))
        opened.pop_all()
    return Parts(config, counts, replicas, schedule)


def _check(config: Config, spec: EnvSpec, counts: Counts, home: torch.device, env: VecEnv | None) -> int:
    """What an environment and a config must agree on. Returns the rows per environment that the data take."""
    check_several(config, spec, env)
    check_groups(config, spec)
    return FAMILIES[config.algo.family].check(config, spec, counts, home)


def check_several(config: Config, spec: EnvSpec, env: VecEnv | None) -> None:
    """Raises ``ConfigError`` where there are to be several replicas of an environment that can only be had once."""
    count = config.algo.replicas
    if count > 1 and env is not None:
        raise ConfigError("algo.replicas", count, "1: a live environment cannot be built again for another replica")
    if count > 1 and spec.single_instance:
        raise ConfigError("algo.replicas", count, f"1: a process can hold one {spec.name} only")


def make_crew(config: Config) -> Threads | Inline:
    """What runs the replicas' ticks."""
    place = config.placement
    if place.executor == "inline":
        return make_inline(place)
    return Threads(names(config.algo.replicas), place.watchdog_seconds, place.start_seconds)


def _assemble(
    config: Config, env: VecEnv, wiring: Wiring, counts: Counts, devices: Devices,
    trace: Trace | None, executor: Executor | None,
) -> Replica:  # fmt: skip
    """Slots, jobs, workers and their schedule around a family's wiring."""
    collector, roles, kind = wiring.collector, wiring.roles, config.algo.schedule
    collector.overlap = config.placement.overlap
    owned = {name: source for role in roles.values() for name, source in role.owns.items()}
    lag = {"policy": config.algo.policy_lag}
    slots = {name: WeightSlot(name, source, lag.get(name, 0)) for name, source in owned.items()}
    rounds = 1 if kind == "concurrent" else counts.rounds
    capture = config.cuda_graphs != "off" and kind != "replicas"  # a push takes locks, which no graph can
    learners = {w: role.learner for w, role in roles.items() if role.learner is not None}
    jobs = {w: LearnerJob(learners[w], counts.updates[w] // rounds, devices[w], capture) for w in learners}
    threads = thread_counts(config)
    workers = {
        # Learners first: a simulator that blocks the launching host then overlaps with queued learner work.
        w: Worker(
            w, jobs.get(w, collector.run), devices[w], [(slots[s], t) for s, t in role.pulls.items()],
            [slots[s] for s in role.owns], threads[w], trace,
        )
        for w, role in roles.items()
    }  # fmt: skip
    schedule: Schedule
    if kind == "concurrent":
        schedule = Concurrent(workers, counts, executor or make_executor(config.placement, devices), collector.owes)
    else:
        alone = Inline() if kind == "replicas" else make_inline(config.placement)  # the crew looks after replicas
        schedule = Lockstep(workers, counts, executor or alone, collector.owes)
    cursors = {w: role.cursor for w, role in roles.items() if role.cursor is not None}
    return Replica(
        config, env, collector, learners, jobs, cursors, wiring.gauges, slots, workers, schedule, wiring.policy
    )


# -- off-policy -----------------------------------------------------------------------------------------------------


def wire_replay(
    config: Config, env: VecEnv, counts: Counts, rows: int, devices: Devices, capture: bool
) -> Wiring:  # fmt: skip
    """DDPG's and SAC's family: a V-learner and a P-learner on a replay."""
    spec, seed = env.spec, seeds(config.seed)
    gens = {w: Generator(devices[w]).manual_seed(seed[w]) for w in ("v", "p", "collector")}
    policy, critic = make_networks(config, spec, seed["init"])
    normalizer = make_normalizer(config, spec, devices["collector"])
    replays = [make_ring(config, spec, rows, counts, devices["v"])]
    if devices["p"] != devices["v"]:
        replays.append(make_ring(config, spec, rows, counts, devices["p"], obs_only=True))
    collector = make_collector(config, env, policy, normalizer, replays, gens["collector"], capture)
    roles = {
        "v": value_role(config, policy, critic, normalizer, replays[0], gens["v"]),
        "p": policy_role(config, policy, critic, normalizer, replays[-1], gens["p"]),
        "collector": Role(pulls={"policy": [Flat(collector.actor.policy).data]}, owns={
            "norm": normalizer.frozen(), "rows": replays[0].live.tensors()}),
    }  # fmt: skip
    cursor, learner = roles["v"].cursor, roles["p"].learner
    assert cursor is not None
    assert learner is not None
    best = cast(ddpg.PolicyState, learner.state).policy
    return Wiring(collector, roles, best, {"replay/bootstrap_lost": cursor.lost})


def value_role(
    config: Config, policy: nn.Module, critic: Critic, norm: Normalizer, replay: Replay, gen: Generator
) -> Role:
    """The V-learner: critic and target, a private policy, normaliser and cursor."""
    algo, net, device = config.algo, config.algo.critic, replay.device
    flat = Flat(copy.deepcopy(critic).to(device), trained=True)
    state = ddpg.ValueState(
        critic=flat, target=Flat(copy.deepcopy(critic).to(device)),
        optimizer=AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps), tau=net.tau,
        smoothing=algo.smoothing, smoothing_clip=algo.smoothing_clip, atoms=make_atoms(config, device),
        target_every=net.target_every, clock=Clock(device) if net.target_every > 1 else None,
    )  # fmt: skip
    replay.constants(algo.n_step, algo.gamma)  # now: their copy to the device would make the first tick wait
    mine, cursor, private = copy.deepcopy(policy).to(device), Cursor(replay.num_envs, device), norm.copy_to(device)
    source = "target_policy" if algo.policy.target else "policy"
    pulls: dict[str, list[Tensor]] = {source: [Flat(mine).data], "norm": private.frozen(), "rows": cursor.tensors()}

    def draw(count: int, gen: Generator) -> list[Batch]:
        batch = replay.sample(cursor, count * algo.batch_size, algo.n_step, algo.gamma, gen)
        reward = batch.reward * private.reward_scale
        batch = batch._replace(obs=private(batch.obs), next_obs=private(batch.next_obs), reward=reward)
        return split(batch, count)

    if algo.family == "sac":
        alpha = torch.zeros(1, device=device)
        pulls["temperature"] = [alpha]
        learner = Learner("v", state, sac.value_update, draw, sac.SacValueInputs(mine, alpha), gen)
    else:
        learner = Learner("v", state, ddpg.value_update, draw, ddpg.ValueInputs(mine), gen)
    return Role(pulls, {"critic": [flat.data]}, learner, cursor)


def policy_role(
    config: Config, policy: nn.Module, critic: Critic, norm: Normalizer, replay: Replay, gen: Generator
) -> Role:
    """The P-learner: policy (and temperature or target policy), a private critic, normaliser and cursor."""
    algo, net, device = config.algo, config.algo.policy, replay.device
    flat = Flat(copy.deepcopy(policy).to(device), trained=True)
    optimizer = AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps)
    mine, cursor, private = copy.deepcopy(critic).to(device), Cursor(replay.num_envs, device), norm.copy_to(device)
    pulls: dict[str, list[Tensor]] = {"critic": [Flat(mine).data], "norm": private.frozen(), "rows": cursor.tensors()}
    inputs = ddpg.PolicyInputs(mine, make_atoms(config, device))
    owns: dict[str, list[Tensor]] = {"policy": [flat.data]}

    def draw(count: int, gen: Generator) -> list[ObsBatch]:
        batch = replay.sample_obs(cursor, count * algo.batch_size, gen)
        return split(batch._replace(obs=private(batch.obs)), count)

    if algo.family == "sac":
        size = replay.action.shape[1]
        temperature = Flat(sac.Temperature(algo.sac.alpha).to(device), trained=True)
        entropy = -float(size) if algo.sac.target_entropy is None else algo.sac.target_entropy
        state = sac.SacPolicyState(
            flat,
            optimizer,
            temperature,
            AdamW(temperature, algo.sac.alpha_lr),
            entropy,
            algo.sac.auto_alpha,
            net.reduce,
        )
        owns["temperature"] = [temperature.data]
        return Role(pulls, owns, Learner("p", state, sac.policy_update, draw, inputs, gen), cursor)
    target = Flat(copy.deepcopy(policy).to(device)) if net.target else None
    if target is not None:
        owns["target_policy"] = [target.data]
    plain = ddpg.PolicyState(flat, target, optimizer, net.tau, net.reduce, net.saturation_penalty)
    return Role(pulls, owns, Learner("p", plain, ddpg.policy_update, draw, inputs, gen), cursor)


def make_atoms(config: Config, device: torch.device) -> Tensor | None:
    """The categorical critic's support [Z], or None for a scalar critic."""
    net = config.algo.critic
    return None if net.atoms is None else torch.linspace(net.v_min, net.v_max, net.atoms, device=device)


def make_networks(config: Config, spec: EnvSpec, seed: int) -> tuple[nn.Module, Critic]:
    """Policy and critic on the CPU, initialised from ``seed`` alone."""
    return seeded(lambda: (make_policy(config, spec), make_critic(config, spec)), seed)


def make_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """The policy network alone, freshly initialised."""
    return FAMILIES[config.algo.family].policy(config, spec)


def make_action_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """DDPG's policy, or SAC's."""
    net = config.algo.policy
    if net.net is not None:
        own = custom_network(config, spec, "policy")
        if net.saturation_penalty > 0 and not _squashes(own, spec):
            allowed = f"0, or a method before_tanh(obs) of algo.policy.net={net.net} whose tanh is forward(obs)"
            raise ConfigError("algo.policy.saturation_penalty", net.saturation_penalty, allowed)
        return own
    kind = GaussianPolicy if config.algo.family == "sac" else DeterministicPolicy
    encoder, group = make_encoder(config, spec, "policy"), groups_of(config, spec, "policy")[0]
    size = spec.obs[group].shape[0] if encoder is None else encoder.size
    return kind(size, cast(Box, spec.action).size, net.hidden, net.activation, net.layer_norm, group, encoder)


@torch.no_grad()
def _squashes(policy: nn.Module, spec: EnvSpec) -> bool:
    """Whether a network of one's own gives what its tanh takes; tried on two rows, with other weights than it has."""
    if not hasattr(policy, "before_tanh"):
        return False
    moved, gen = cast(Any, copy.deepcopy(policy)), torch.Generator().manual_seed(0)
    for weight in moved.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=gen)
    drawn = {k: torch.randn(2, *s.shape, generator=gen) for k, s in spec.obs.items()}
    kinds = {k: s.dtype for k, s in spec.obs.items()}
    obs = {k: v if kinds[k].is_floating_point else (100 * v.abs()).to(kinds[k]) for k, v in drawn.items()}
    return torch.allclose(torch.tanh(moved.before_tanh(obs)).float(), moved(obs).float(), atol=1e-5)


def make_critic(config: Config, spec: EnvSpec) -> Critic:
    """The critics, freshly initialised."""
    net = config.algo.critic
    if net.net is not None:
        return cast(Critic, custom_network(config, spec, "critic"))
    encoder, group = make_encoder(config, spec, "critic"), groups_of(config, spec, "critic")[0]
    size = spec.obs[group].shape[0] if encoder is None else encoder.size
    return Critic(
        group, size, cast(Box, spec.action).size, net.hidden, net.activation, net.layer_norm, net.ensemble, net.atoms,
        encoder,
    )  # fmt: skip


def make_collector(
    config: Config,
    env: VecEnv,
    policy: nn.Module,
    norm: Normalizer,
    replays: list[Replay],
    gen: Generator,
    capture: bool,
) -> Collector:
    """The collector with its private policy and exploration noise."""
    explore, spec = config.algo.explore, env.spec
    noise = Exploration(
        explore.kind, explore.low, explore.high, spec.num_envs, cast(Box, spec.action).size, spec.device, explore.repeat
    )
    act: ActFunction = act_stochastic if config.algo.family == "sac" else act_deterministic
    actor = NoisyActor(copy.deepcopy(policy).to(spec.device), act, noise, spec)
    return Collector(env, actor, norm, replays, gen, capture)


def act_deterministic(policy: nn.Module, obs: Obs, gen: Generator) -> Tensor:
    return policy(obs)


def act_stochastic(policy: nn.Module, obs: Obs, gen: Generator) -> Tensor:
    mean, log_std = policy(obs)
    return squashed_gaussian(mean, log_std, gen)[0]


def check_spec(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """What an environment and a config must agree on. Returns the replay's rows T.

    Raises:
        ConfigError: an action or observation space that no network here takes, a replay that is too small or too large.
    """
    if not isinstance(spec.action, Box):
        raise ConfigError(
            "task", config.task.name,
            f"a task with bounded continuous actions; this one has {spec.action}: for that, algo=dqn, ppo, ...",
        )  # fmt: skip
    check_obs(config, spec)
    return ring_rows(config, spec, counts, device)


REPLAY = Family(
    ("v", "p"), lambda c: tick_counts(c.algo.v_per_step, c.algo.p_per_v), check_spec, wire_replay, make_action_policy
)
FAMILIES = {
    "ddpg": REPLAY, "sac": REPLAY, "ppo": ROLLOUT, "impala": ROLLOUT, "dqn": VALUE, "r2d2": RECURRENT,
    "pqn": VALUE_ROLLOUT,
}  # fmt: skip
