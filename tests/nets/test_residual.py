"""Residual blocks (SimBa) in the networks of value-based and on-policy algorithms, written out."""

import pytest
import torch
from plain_nets import plain
from torch import nn

from pql.algos.on_policy import make_network
from pql.algos.registry import family_of
from pql.config.compose import compose
from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.errors import ConfigError
from pql.nets.mlp import ResidualBlock

D = 3
BLOCKS = {
    # settings: blocks of the network
    ("algo=dqn",): 2,
    ("algo=dqn", "algo.dueling=true"): 3,  # one shared, one in each stream
    ("algo=dqn", "algo.critic.quantiles=4"): 2,
    ("algo=dqn", "algo.dueling=true", "algo.critic.hidden=[8]"): 2,  # the streams alone
    ("algo=r2d2", "algo.dueling=false", "algo.feedback=false"): 2,
    ("algo=pqn",): 2,
    ("algo=ppo", "algo.policy.trunk=residual", "algo.policy.hidden=[8,8]"): 4,
    ("algo=impala", "algo.policy.trunk=residual", "algo.policy.hidden=[8,8]"): 2,  # shared by policy and value
}


def network(words, norm="layer"):
    critic = [] if "algo=impala" in words else ["algo.critic.trunk=residual", f"algo.critic.norm={norm}"]
    config = compose(["device=cpu", "task=cartpole", "algo.critic.hidden=[8,8]", *critic, *words])
    spec = EnvSpec("made up", 8, {"policy": ObsSpec((D,))}, Discrete(4), torch.device("cpu"))
    torch.manual_seed(0)
    make = make_network if {"algo=ppo", "algo=impala"} & {*words} else family_of(config).policy
    return make(config, spec)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("words", BLOCKS, ids=" ".join)
def test_residual_blocks_are_those_of_the_paper(words, norm):
    net = network(words, norm)
    assert sum(isinstance(m, ResidualBlock) for m in net.modules()) == BLOCKS[words]
    stacks = [m for m in net.modules() if isinstance(m, nn.Sequential) and any(isinstance(c, ResidualBlock) for c in m)]
    for stack in stacks:
        for module in stack.modules():  # gains and biases away from 1 and 0
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                nn.init.uniform_(module.weight, 0.5, 2)
        x = torch.randn(4, stack[0].in_features)
        torch.testing.assert_close(stack(x).double(), plain(stack)(x.double()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("algo=dqn", "algo.critic.trunk=residual"), "algo.critic.hidden"),
        (("algo=ppo", "algo.policy.trunk=residual"), "algo.policy.hidden"),
    ],
)
def test_blocks_have_one_width(words, name):
    with pytest.raises(ConfigError, match=rf"{name}=\[8, 6\]: expected one width for all residual blocks"):
        compose(["device=cpu", "task=cartpole", *words, f"{name}=[8,6]"])
