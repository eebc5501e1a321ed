"""Distillation: a student learns the actions of a trained policy, its teacher, from the student's own rollouts.

DAgger (Ross et al. 2011) with a replay: the student acts, and its learner regresses its mean action on the teacher's,
at observations of the replay. The teacher may read groups that the student lacks; its labels are computed when drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from pql.algos.builders import check_continuous, make_normalizer, make_ring, replay_learner, ring_rows, stored_obs
from pql.algos.critics import loss_share
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
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_adamw, make_lr_schedule
from pql.engine.schedule import Counts
from pql.engine.worker import State
from pql.errors import ConfigError
from pql.nets.encoders import groups_of
from pql.nets.mlp import seeded
from pql.types import Metrics, Obs, split

Teacher = Callable[[Obs], Tensor]
"""Observations before normalisation, [B, ...] by group -> actions [B, A] in [-1, 1]."""


class Lesson(NamedTuple):
    """Rows of a batch."""

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B, A] the teacher's
    mask: Tensor  # [B] 0 or 1
    weight: Tensor  # [B] 1


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


def check_distill(config: Config[DistillConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T. Raises ``ConfigError``."""
    check_continuous(config, spec)
    if config.algo.policy.net is None:
        groups_of(config, spec, "policy")
    return ring_rows(config, spec, counts, device)


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
    norm, ring = make_normalizer(setup), make_ring(setup, "v", obs_only=True)
    actor = make_noisy_actor(student_action, config, spec, net)
    collector = Collector(setup.env, actor, norm, [ring], setup.generator("collector"), setup.execution)
    flat = Flat(learner_copy(net, algo, device), trained=True)
    optimizer = make_adamw(flat, algo.policy)
    optimizer.schedule = make_lr_schedule(algo)
    draw = LessonDraw(algo, ring, Cursor(ring.num_envs, device), norm.copy_to(device), make_augment(setup), teacher)
    state = StudentState(flat, optimizer)
    learner = replay_learner(setup, state, distill_update, draw, {}, {"policy": flat.tensors()})
    pulls = {"policy": Flat(collector.actor.policy).tensors()}
    publishes = {"norm": norm.frozen(), "rows": ring.live.tensors()}
    return Wiring(collector, pulls, publishes, [learner], flat, {}, {"algo.teacher": loaded.digest()})


def student_action(policy: nn.Module, obs: Obs, noise: Any) -> Tensor:
    """Return the student's mean action [N, A]."""
    return mean_action(policy, obs)


FAMILY = Family(DistillConfig, value_counts, check_distill, wire_distill, gaussian_policy)
