"""Distillation: a student learns the actions of a trained policy, its teacher, from the student's own rollouts.

DAgger (Ross et al. 2011) with a replay: the student acts, and its learner regresses its mean action on the teacher's,
at observations of the replay. The teacher may read groups that the student lacks; its labels are computed when drawn.
A student with a memory learns from sequences, as the actor-critics do (:mod:`pql.algos.memory`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from pql.algos.builders import (
    ReplayDraw,
    SequenceDraw,
    check_continuous,
    make_normalizer,
    make_ring,
    make_sequences,
    replay_learner,
    ring_rows,
    sequence_ring_rows,
    stored_obs,
)
from pql.algos.critics import loss_share
from pql.algos.memory import recalled, trained
from pql.algos.off_policy import learner_copy, make_augment, make_noisy_actor, mean_action
from pql.algos.registry import Family, Setup, Wiring
from pql.algos.sac import gaussian_policy
from pql.algos.value import value_counts
from pql.collect.collector import Collector
from pql.config import Config
from pql.config.algorithms.distill import DistillConfig
from pql.contract.env import EnvSpec
from pql.data.augment import Augment
from pql.data.normalize import Normalizer
from pql.data.replay import Cursor, Replay
from pql.data.sequences import Sequence, Sequences, States
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_adamw, make_lr_schedule
from pql.engine.schedule import Counts
from pql.engine.worker import State, Update
from pql.errors import ConfigError
from pql.nets.encoders import groups_of
from pql.nets.memory import RECALLED
from pql.nets.mlp import Reads, seeded
from pql.types import Metrics, Obs, split

Teacher = Callable[[Obs], Tensor]
"""Observations before normalisation, [B, ...] by group -> actions [B, A] in [-1, 1]."""


class Lesson(NamedTuple):
    """Rows of a batch."""

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B, A] the teacher's
    mask: Tensor  # [B] 0 or 1
    weight: Tensor  # [B] 1


class SequenceLesson(NamedTuple):
    """A batch of sequences of a student with a memory."""

    seq: Sequence
    action: Tensor  # [L * B, A] the teacher's, in the trained rows


@dataclass
class StudentState(State):
    """State of the learner."""

    policy: Flat
    optimizer: AdamW


def distill_update(state: StudentState, batch: Lesson, settings: DistillConfig, gen: Generator) -> Metrics:
    """Take one step on the distance between the student's mean action and the teacher's. Mutates ``state`` only."""
    action = mean_action(state.policy.module, batch.obs)
    distance = F.mse_loss if settings.loss == "mse" else F.huber_loss
    share = loss_share(batch.mask, batch.weight)
    loss = (share * distance(action, batch.action, reduction="none").mean(-1)).sum()
    norm = state.optimizer.minimize(loss, mask=batch.mask)
    return {"loss/policy": loss.detach(), "grad_norm/policy": norm}


def distill_sequences(state: StudentState, lesson: SequenceLesson, settings: DistillConfig, gen: Generator) -> Metrics:
    """Run the student's memory over sequences, then :func:`distill_update` on their trained rows."""
    seq, obs = trained(lesson.seq, settings.burn_in)
    obs[RECALLED["policy"]] = recalled(cast(Reads, state.policy.module), seq, settings.burn_in).flatten(0, 1)
    weight = seq.weight.expand_as(seq.mask)
    batch = Lesson(obs, lesson.action, seq.mask.flatten(), weight.flatten())
    return {**distill_update(state, batch, settings, gen), "replay/used": seq.mask.mean()}


@dataclass
class LessonDraw:
    """Sample batches of observations, with the teacher's actions."""

    worker: ClassVar[str] = "v"
    algo: DistillConfig
    replay: Replay
    cursor: Cursor
    norm: Normalizer
    augment: Augment
    teacher: Teacher

    @torch.no_grad()
    def __call__(self, count: int, gen: Generator) -> list[Lesson]:
        """Return ``count`` batches of B rows."""
        drawn = self.replay.sample_obs(self.cursor, count * self.algo.batch_size, gen)
        batches = split(drawn._replace(obs=self.norm(drawn.obs)), count)
        labels = self.teacher(drawn.obs).chunk(count)
        pairs = zip(batches, labels, strict=True)
        return [Lesson(self.augment(one.obs, gen), action, one.mask, one.weight) for one, action in pairs]


@dataclass
class SequenceLessonDraw(SequenceDraw):
    """Sample batches of sequences, with the teacher's actions in their trained rows."""

    teacher: Teacher

    @torch.no_grad()
    def __call__(self, count: int, gen: Generator) -> Iterator[SequenceLesson]:  # type: ignore[override]
        """Yield ``count`` batches of B sequences."""
        for _ in range(count):
            seq = self.sequences.sample(self.cursor, self.batch_size, gen)
            labels = self.teacher(trained(seq, cast(Sequences, self.sequences).burn_in)[1])
            yield SequenceLesson(seq._replace(obs=self.norm(seq.obs)), labels)


def check_distill(config: Config[DistillConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T. Raises ``ConfigError``."""
    check_continuous(config, spec)
    if config.algo.policy.net is None:
        groups_of(config, spec, "policy")
    return (ring_rows if config.algo.lstm is None else sequence_ring_rows)(config, spec, counts, device)


def check_teacher(policy: Any, config: Config[DistillConfig], spec: EnvSpec) -> Teacher:
    """Return a loaded policy as a function of observations as the replay stores them.

    Raises:
        ConfigError: it has a memory, other actions, or reads a group that the task lacks or has in another shape.
    """
    path, stored = config.algo.teacher, stored_obs(config, spec)
    if policy.state_shapes:
        raise ConfigError("algo.teacher", path, "a policy without memory")
    if policy.spec.action.shape != spec.action.shape:
        raise ConfigError("algo.teacher", path, f"a policy with actions {spec.action}, not {policy.spec.action}")
    for group in policy.groups:
        wanted, have = policy.spec.obs[group].shape, spec.obs[group].shape if group in spec.obs else None
        if have != wanted:
            raise ConfigError(
                "algo.teacher", path, f"a policy of this task's groups: {group!r} is {have} here, not {wanted}"
            )
        if tuple(stored[group].shape) != tuple(wanted):
            whole = f"null: the teacher reads whole images, {group!r} of {list(wanted)}"
            raise ConfigError("algo.encoder.size", config.algo.encoder.size, whole)

    def teacher(obs: Obs) -> Tensor:
        return cast(Tensor, policy.act({k: obs[k] for k in policy.groups}, {})[0])

    return teacher


def wire_distill(setup: Setup[DistillConfig]) -> Wiring:
    """Create the student, a replay of observations, the collector and the learner."""
    config, spec, algo, device = setup.config, setup.spec, setup.config.algo, setup.devices["v"]
    if algo.teacher is None:
        raise ConfigError("algo.teacher", None, "a run directory, a checkpoint or an export")
    try:
        loaded = setup.load(algo.teacher, device)
    except ConfigError as error:
        raise ConfigError("algo.teacher", algo.teacher, error.allowed) from error
    teacher = check_teacher(loaded, config, spec)
    net = seeded(partial(gaussian_policy, config, spec), setup.init_seed)
    norm, ring = make_normalizer(setup), make_ring(setup, "v", obs_only=algo.lstm is None)
    actor = make_noisy_actor(student_action, config, spec, net)
    # States are allocated before their ring: see States.
    states = None if actor.before is None else States(ring, actor.before.shape[1], algo.period)
    stores = [ring] if states is None else [states, ring]
    collector = Collector(setup.env, actor, norm, stores, setup.generator("collector"), setup.execution)
    flat = Flat(learner_copy(net, algo, device), trained=True)
    optimizer = make_adamw(flat, algo.policy)
    optimizer.schedule = make_lr_schedule(algo)
    own, state = (Cursor(ring.num_envs, device), norm.copy_to(device)), StudentState(flat, optimizer)
    update: Update[Any, Any, DistillConfig] = distill_update
    draw: ReplayDraw = LessonDraw(algo, ring, *own, make_augment(setup), teacher)
    if states is not None:
        update, count = distill_sequences, algo.batch_size // algo.length
        draw = SequenceLessonDraw("v", count, ring, *own, make_sequences(config, states), teacher)
    learner = replay_learner(setup, state, update, draw, {}, {"policy": flat.tensors()})
    pulls = {"policy": Flat(collector.actor.policy).tensors()}
    publishes = {"norm": norm.frozen(), "rows": ring.live.tensors()}
    return Wiring(collector, pulls, publishes, [learner], flat, {}, {"algo.teacher": loaded.digest()})


def student_action(policy: nn.Module, obs: Obs, noise: Any) -> Tensor:
    """Return the student's mean action [N, A]."""
    return mean_action(policy, obs)


FAMILY = Family(DistillConfig, value_counts, check_distill, wire_distill, gaussian_policy)
