"""R2D2: double Q-learning on sequences, by a recurrent network whose stored state is brought up to date first.

Source: Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning); the rescaling of
values is that of Pohlen et al. 2018 (Observe and Look Further), Proposition A.2.
"""

from typing import cast

import torch
from torch import Generator, Tensor

from pql.algos.ddpg import loss_share
from pql.algos.dqn import huber
from pql.algos.recurrent import Recurrent
from pql.algos.value import ValueState
from pql.config import R2d2Config
from pql.data.sequences import Sequence, mixed
from pql.engine.optim import follow
from pql.nets.q import RecurrentQNetwork
from pql.types import Metrics


def update(state: ValueState, inputs: R2d2Config, batch: Sequence, gen: Generator) -> Metrics:
    """One step of Q(s, a) on every trained row of the sequences, and of their priorities. Mutates ``state`` only."""
    net, target_net = (cast(RecurrentQNetwork, n) for n in state.nets)
    ours = values(net, batch, inputs.burn_in)  # [S - burn_in + K, B, n]
    with torch.no_grad():
        theirs = values(target_net, batch, inputs.burn_in)
        best = (ours if inputs.double else theirs).argmax(-1, keepdim=True)
        ahead = theirs.gather(-1, best).squeeze(-1).gather(0, batch.successor)  # [L, B]
        target = targets(batch.reward, batch.discount, ahead, inputs.rescale)
    q = ours[: target.shape[0]].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    error = target - q
    total = (huber(error, inputs.huber) * loss_share(batch.mask, batch.weight)).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    follow(state.target, state.q, state.clock, state.target_every)
    error, q = error.detach(), q.detach()
    assert state.priorities is not None
    state.priorities.update(batch.index, mixed(error, batch.mask, inputs.eta), batch.mask.amax(0))
    share = loss_share(batch.mask, torch.ones_like(batch.weight))
    return {
        "loss/critic": total.detach(),
        "value/q": (q * share).sum(),
        "value/td_error": (error.abs() * share).sum(),
        "grad_norm/critic": norm,
        "replay/weight_mean": (batch.weight * share).sum(),
        "replay/used": batch.mask.mean(),
    }


def values(net: RecurrentQNetwork, batch: Sequence, burn_in: int) -> Tensor:
    """Q of all actions in the rows from ``burn_in`` on, then in the final observations: [S - burn_in + K, B, n].

    The rows before only bring the state up to date, without gradients; final observations are seen with the state that
    their row left, before it was zeroed.
    """
    rows = batch.first.shape[0]
    obs = {k: (v[:burn_in], v[burn_in:rows], v[rows:]) for k, v in batch.obs.items()}
    carry = batch.carry
    if burn_in:
        with torch.no_grad():
            carry = net.remember({k: v[0] for k, v in obs.items()}, carry, batch.first[:burn_in])
    q, after = net.unroll({k: v[1] for k, v in obs.items()}, carry, batch.first[burn_in:])
    with torch.no_grad():
        left = after.gather(0, batch.final_row.unsqueeze(-1).expand(-1, -1, after.shape[-1]))  # [K, B, C]
        final = net.step({k: v[2].flatten(0, 1) for k, v in obs.items()}, left.flatten(0, 1))[0]
    return torch.cat((q, final.view(*batch.final_row.shape, -1)))


def targets(reward: Tensor, discount: Tensor, ahead: Tensor, epsilon: float | None) -> Tensor:
    """h(reward + discount * h^-1(ahead)); without rescaling, h is the identity."""
    if epsilon is None:
        return torch.addcmul(reward, discount, ahead)
    return rescale(torch.addcmul(reward, discount, restore(ahead, epsilon)), epsilon)


def rescale(x: Tensor, epsilon: float) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + epsilon * x


def restore(x: Tensor, epsilon: float) -> Tensor:
    """h^-1(x) = sign(x) (((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1).

    Formed in float64: the difference of nearly equal numbers, squared, would lose half of float32's digits.
    """
    wide = x.double()
    root = (1 + 4 * epsilon * (wide.abs() + 1 + epsilon)).sqrt()
    return (wide.sign() * (((root - 1) / (2 * epsilon)).square() - 1)).to(x.dtype)


FAMILY = Recurrent(R2d2Config, update, targets).family()
