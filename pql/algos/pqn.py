"""PQN: Q-learning on fresh rollouts of many environments, without replay and without a target network.

Source: Gallici et al. 2024, "Simplifying Deep Temporal Difference Learning". Layer normalisation keeps values stable,
Q(lambda) returns carry rewards back, and every rollout is used for a few epochs and then forgotten.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pql.algos.value_rollout import PqnState, ValueRollout, values
from pql.config import PqnConfig
from pql.data.returns import lambda_returns
from pql.data.rollout import Segment, by_parts, minibatches
from pql.engine.optim import annealed
from pql.types import Metrics, Obs


class Minibatch(NamedTuple):
    """Rows [B] of a segment."""

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B] int64
    target: Tensor  # [B] Q(lambda) return
    mask: Tensor  # [B] 0 or 1


def draw(state: PqnState, settings: PqnConfig, segment: Segment, gen: Generator) -> Iterator[Minibatch]:
    """A tick's minibatches: targets once, then ``epochs`` times all rows in random order."""
    begin_tick(state, settings, segment)
    rows = {"action": segment.action, "target": returns(state, settings, segment), "mask": segment.mask}
    count = segment.mask.shape[0]
    columns = {**rows, **{f"obs/{k}": v[:count] for k, v in segment.obs.items()}}
    flat = {k: v.flatten(0, 1) for k, v in columns.items()}
    for part in minibatches(flat, settings.epochs, settings.minibatches, 0, gen):
        obs = {k: part[f"obs/{k}"] for k in segment.obs}
        yield Minibatch(obs, part["action"], part["target"], part["mask"])


@torch.no_grad()
def begin_tick(state: PqnState, settings: PqnConfig, segment: Segment) -> None:
    """Count the tick and set the annealed learning rate."""
    now = state.progress
    now.lost += segment.lost
    if settings.anneal_steps is not None:
        left = annealed(now.ticks, now.steps_per_tick, settings.anneal_steps)
        state.optimizer.lr.copy_(settings.critic.lr * left)
    now.ticks += 1


@torch.no_grad()
def returns(state: PqnState, settings: PqnConfig, segment: Segment) -> Tensor:
    """R_t = r_t + discount_t ((1 - lambda) max_a Q(s'_t, a) + lambda R_{t+1}), [T, N]; at the end of a trajectory
    R_{t+1} is max_a Q(s'_t, a) (Gallici et al. 2024, section 4: Peng's Q(lambda)).

    The values of the rows are those that acted (``segment.params``), and the network is still the one that acted: it
    is asked only for the observations that follow the last row and for final ones.
    """
    rows = segment.mask.shape[0]
    rest = {k: v[rows:] for k, v in segment.obs.items()}
    beyond = by_parts(lambda obs: values(state.net, obs, settings.amp).amax(-1), rest, rows)
    value = torch.cat((segment.params.amax(-1), beyond))  # [T + 1 + K + 1, N]
    next_value = value.gather(0, segment.successor)
    return lambda_returns(
        segment.reward,
        settings.gamma * segment.alive,
        value[:rows],
        next_value,
        segment.goes_on,
        segment.mask,
        settings.q_lambda,
    )


def update(state: PqnState, inputs: PqnConfig, batch: Minibatch, gen: Generator) -> Metrics:
    """One step on 0.5 E[(Q(s, a) - R)^2]. Mutates ``state`` only."""
    q = values(state.net, batch.obs, inputs.amp).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    share = batch.mask / batch.mask.sum().clamp(min=1)
    loss = 0.5 * (share * (q - batch.target).square()).sum()
    state.optimizer.zero_grad()
    loss.backward()
    norm = state.optimizer.step(mask=batch.mask)
    with torch.no_grad():
        mean = (share * q).sum()
    return {"loss/critic": loss.detach(), "grad_norm/critic": norm, "value/q": mean, "policy/lr": state.optimizer.lr}


FAMILY = ValueRollout(PqnConfig, draw, update).family()
