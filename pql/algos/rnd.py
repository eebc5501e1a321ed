"""Random network distillation (Burda et al. 2019, arXiv 1810.12894): a bonus for states that a network cannot predict.

The bonus of a state s is ``w |f(s) - g(s)|``, where f is a fixed random network and g is trained to predict it. Here it
is never stored: learners compute it for the rows of a batch with the current g, which is then trained on these rows.
With n-step targets a window has the bonus of its last state. On rollouts it enters the advantages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from pql.algos.registry import Setup
from pql.config import Config
from pql.config.groups import RndConfig
from pql.contract.env import EnvSpec
from pql.data.normalize import EPSILON, Moments
from pql.data.rollout import Segment
from pql.engine.collectives import ALONE, Group
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, LrSchedule
from pql.engine.worker import State, Update
from pql.errors import ConfigError, nearest
from pql.nets.mlp import Layers, mlp, seeded
from pql.types import Batch, Metrics, Obs

SEED = 0x524E44  # added to the run's, so that no other network begins with these weights


@dataclass(kw_only=True)
class Novelty(State):
    """Both networks and their statistics.

    Attributes:
        groups: observation groups that they read, [B, D] each.
        errors: statistics of |f - g|, by whose standard deviation bonuses are divided; None: they are not.
        schedule: factor on the weight by steps of ``optimizer``.
    """

    predictor: Flat
    target: Flat
    optimizer: AdamW
    errors: Moments | None
    schedule: LrSchedule
    groups: tuple[str, ...]
    settings: RndConfig
    group: Group = ALONE

    def connect(self, group: Group) -> None:
        super().connect(group)
        self.group = group

    def error(self, obs: Obs) -> Tensor:
        """Return |f - g| at normalised observations [..., D], [...]."""
        x = torch.cat([obs[k] for k in self.groups], -1)
        with torch.no_grad():
            wanted = self.target.module(x)
        return torch.linalg.vector_norm(wanted - self.predictor.module(x), dim=-1)

    @torch.no_grad()
    def bonus(self, obs: Obs) -> Tensor:
        """Return bonuses [...] of observations [..., D]."""
        error = self.error(obs)
        if self.errors is not None:
            error = error * (self.errors.variance() + EPSILON).rsqrt().float()
        return error * (self.settings.weight * self.schedule(self.optimizer.count))

    def train(self, obs: Obs, mask: Tensor) -> Metrics:
        """Take one step of g on the rows of ``mask`` [B]."""
        error = self.error(obs)
        share = mask / mask.sum().clamp(min=1)
        loss = (error.square() * share).sum()
        if self.errors is not None:
            self.errors.update(error.detach().flatten(), (mask > 0).flatten(), self.group)
        self.optimizer.minimize(loss, mask=mask)
        return {"loss/rnd": loss.detach()}


def groups_of_bonus(config: Config, spec: EnvSpec) -> tuple[str, ...]:
    """Return the observation groups that the bonus reads; none without ``algo.rnd.weight``.

    Raises:
        ConfigError: an unknown group of observations, or one of images.
    """
    settings: RndConfig | None = getattr(config.algo, "rnd", None)
    groups = () if settings is None or settings.weight == 0 else tuple(settings.obs or ("policy",))
    for group in groups:
        if group not in spec.obs or len(spec.obs[group].shape) != 1:
            known = [k for k, s in spec.obs.items() if len(s.shape) == 1]
            allowed = f"groups of vectors of {spec.name}: {', '.join(known) or 'none'}{nearest(group, known)}"
            raise ConfigError("algo.rnd.obs", group, allowed)
    return groups


def make_novelty(setup: Setup[Any], device: torch.device) -> Novelty | None:
    """Create the networks; None without ``algo.rnd.weight``."""
    spec, groups = setup.spec, groups_of_bonus(setup.config, setup.spec)
    if not groups:
        return None
    settings: RndConfig = setup.config.algo.rnd
    size, layers = sum(spec.obs[k].shape[0] for k in groups), Layers(tuple(settings.hidden), "relu")
    nets = seeded(lambda: [mlp(size, layers, settings.outputs).to(device) for _ in range(2)], setup.init_seed + SEED)
    predictor = Flat(nets[0], trained=True)
    return Novelty(
        predictor=predictor,
        target=Flat(nets[1]),
        optimizer=AdamW(predictor, settings.lr),
        errors=Moments((), device) if settings.normalize else None,
        schedule=LrSchedule("linear", settings.updates, settings.final),
        groups=groups,
        settings=settings,
    )


def curious_values(update: Update[Any, Any, Any], novelty: Novelty) -> Update[Any, Any, Any]:
    """Return a V-learner's ``update`` on rewards with bonuses, which also trains the prediction."""

    def updated(state: Any, batch: Batch, settings: Any, gen: Generator) -> Metrics:
        bonus = novelty.bonus(batch.next_obs) * batch.followed
        metrics = update(state, batch._replace(reward=batch.reward + bonus), settings, gen)
        mean = (bonus * batch.followed).sum() / batch.followed.sum().clamp(min=1)
        return {**metrics, **novelty.train(batch.next_obs, batch.followed), "reward/bonus": mean}

    return updated


Draw = Callable[[Any, Segment, Any, Generator], Iterable[Any]]


def curious_rollouts(draw: Draw, update: Update[Any, Any, Any], novelty: Novelty) -> tuple[Draw, Update[Any, Any, Any]]:
    """Return ``draw`` on rewards with bonuses, and ``update``, which also trains the prediction on its minibatch."""

    def drawn(state: Any, segment: Segment, settings: Any, gen: Generator) -> Iterable[Any]:
        following = novelty.bonus(segment.obs).gather(0, segment.successor)
        return draw(state, segment._replace(reward=segment.reward + following * segment.mask), settings, gen)

    return drawn, partial(_with_training, update, novelty)


def _with_training(
    update: Update[Any, Any, Any], novelty: Novelty, state: Any, batch: Any, settings: Any, gen: Generator
) -> Metrics:
    return {**update(state, batch, settings, gen), **novelty.train(batch.obs, batch.mask)}
