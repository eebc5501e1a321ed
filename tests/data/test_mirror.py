"""Reflections: of names and vectors, of a simulator's step, of batches, and in runs."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import bits, differences, go_on, start

from pql.algos.mirror import with_mirror_loss
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec, make_env
from pql.contract.symmetry import POLAR, SCALAR, by_names, side_by_side
from pql.data.mirror import Mirror
from pql.engine.flat import Flat
from pql.engine.optim import AdamW
from pql.errors import ConfigError
from pql.nets.distributions import DiagGaussian
from pql.remote.process.far_build import describe_simulator
from pql.remote.process.near import read_spec
from pql.remote.protocol import ProtocolError, check_facts
from pql.types import Batch

CPU = torch.device("cpu")
LEGS = ["LF_HAA", "LF_HFE", "RF_HAA", "RF_HFE", "waist"]


def spec_of(symmetry, size=3):
    return EnvSpec("robot", 4, {"policy": ObsSpec((size,))}, Box(2), CPU, info={"symmetry": symmetry})


def mirror_of(augment="double"):
    pair = ((1, 0), (-1, -1))
    return Mirror(spec_of({"policy": side_by_side(SCALAR, pair), "action": pair}), augment, ["policy"], CPU)


def test_maps_by_names_and_of_vectors():
    legs = by_names(LEGS, {"LF": "RF"}, ("HAA", "waist"))
    assert legs == ((2, 3, 0, 1, 4), (-1, 1, -1, 1, -1))
    assert side_by_side(SCALAR, legs)[0] == (0, 3, 4, 1, 2, 5)
    with pytest.raises(ConfigError, match="symmetry=LF_KFE: expected joints in pairs: there is no RF_KFE"):
        by_names(["LF_KFE"], {"LF": "RF"})


@pytest.mark.parametrize(
    ("symmetry", "message"),
    [
        ({}, "algo.symmetry.augment=half: expected off: robot declares no symmetry of 'policy'"),
        ({"policy": POLAR, "action": 3}, "symmetry of action=3: expected 2 indices"),
        ({"policy": POLAR, "action": ((1, 0), None)}, "symmetry of action"),
        ({"policy": POLAR}, "declares no symmetry of 'action'"),
        ({"policy": SCALAR, "action": ((1, 0), (1, 1))}, "symmetry of policy"),
        ({"policy": POLAR, "action": ((1, 0), (1, -1))}, "2 indices and 2 signs that give the identity when applied"),
    ],
)
def test_a_symmetry_that_is_missing_or_wrong_is_refused(symmetry, message):
    with pytest.raises(ConfigError, match=message):
        Mirror(spec_of(symmetry), "half", ["policy"], CPU)


def test_a_symmetry_crosses_the_border_of_a_process():
    spec = spec_of({"policy": POLAR, "action": ((1, 0), (-1, -1))})
    facts = json.loads(json.dumps(describe_simulator(spec)))
    there = Mirror(read_spec(facts, CPU), "half", ["policy"], CPU)
    x = torch.arange(6.0).view(2, 3)
    assert there.reflected("policy", x).equal(x * torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ProtocolError, match="symmetry is no mapping"):
        check_facts({**facts, "info": {"symmetry": [1]}})


ROBOTS = {  # largest error of a coordinate: left and right of the models differ a little (humanoid: a knee's spring)
    "ant": 1e-5,
    "ant, 27": 1e-5,
    "walker2d": 1e-5,
    "swimmer": 1e-5,
    "humanoid, 45": 0.3,
    "anymal": 0.03,
    "go1_velocity": 0.15,
    "g1_velocity": 0.02,
}


@pytest.mark.parametrize("robot", ROBOTS)
def test_a_step_of_the_reflected_state_is_the_reflected_step(robot):
    name, short = robot.split(",")[0], "," in robot
    kwargs = {"contact_forces": False} if short else {}
    try:
        one, two = (make_env(name, 32, **kwargs) for _ in range(2))
    except ConfigError as error:
        pytest.skip(str(error))
    mirror, gen = Mirror(one.spec, "double", ["policy"], CPU), torch.Generator().manual_seed(1)
    one.reset(0)
    for _ in range(15):
        one.step(torch.rand(32, one.spec.action.size, generator=gen) * 2 - 1)
    state = one.state_dict()
    two.reset(0)
    two.load_state_dict(one.reflected(state))
    action = torch.rand(32, one.spec.action.size, generator=gen) * 2 - 1
    a, b = one.step(action), two.step(mirror.reflected("action", action))
    goes_on = ~(a.terminated | a.truncated)
    if "command" in state["memory"]:  # some are drawn anew
        goes_on &= (one.state_dict()["memory"]["command"] == state["memory"]["command"]).all(1)
    assert int(goes_on.sum()) > 20
    assert a.terminated.equal(b.terminated)
    torch.testing.assert_close(
        mirror.obs(a.obs)["policy"][goes_on], b.obs["policy"][goes_on], rtol=0, atol=ROBOTS[robot]
    )
    torch.testing.assert_close(a.reward, b.reward, rtol=0, atol=ROBOTS[robot])
    assert not torch.equal(a.obs["policy"], b.obs["policy"])
    one.close()
    two.close()


def batch_of(rows):
    gen = torch.Generator().manual_seed(0)
    obs, after = ({"policy": torch.rand(rows, 3, generator=gen)} for _ in range(2))
    numbers = [torch.rand(rows, generator=gen) for _ in range(6)]
    return Batch(obs, torch.rand(rows, 2, generator=gen), *numbers[:2], after, *numbers[2:])


def test_a_doubled_batch_has_the_reflected_rows_after_its_own():
    batch = batch_of(6)
    both = mirror_of().rows(batch, 2, torch.Generator())
    assert both.obs["policy"].shape == (12, 3)
    for i in range(2):  # of two batches of three rows
        own, rows = slice(3 * i, 3 * i + 3), slice(6 * i, 6 * i + 3)
        turned = slice(6 * i + 3, 6 * i + 6)
        assert both.obs["policy"][rows].equal(batch.obs["policy"][own])
        assert both.next_obs["policy"][turned].equal(
            batch.next_obs["policy"][own][:, [0, 2, 1]] * torch.tensor([1, -1, -1])
        )
        assert both.action[turned].equal(-batch.action[own].flip(1))
        for field in ("reward", "discount", "mask", "weight", "index", "followed"):
            assert getattr(both, field)[rows].equal(getattr(batch, field)[own])
            assert getattr(both, field)[turned].equal(getattr(batch, field)[own])


def test_half_of_the_rows_are_reflected_as_a_whole():
    batch = batch_of(400)
    some = mirror_of("half").rows(batch, 2, torch.Generator().manual_seed(3))
    turned = (some.action == -batch.action.flip(1)).all(1)
    assert 150 < int(turned.sum()) < 250
    assert some.action[~turned].equal(batch.action[~turned])
    assert some.obs["policy"][turned].equal(mirror_of().obs(batch.obs)["policy"][turned])
    assert some.next_obs["policy"][~turned].equal(batch.next_obs["policy"][~turned])
    assert some.reward.equal(batch.reward)


def test_reflected_actions_have_the_probability_of_the_originals():
    gen, dist, mirror = torch.Generator().manual_seed(0), DiagGaussian(2), mirror_of()
    params, action = torch.randn(5, 4, generator=gen), torch.randn(5, 2, generator=gen)
    turned = dist.log_prob(mirror.params(params), mirror.reflected("action", action))
    torch.testing.assert_close(turned, dist.log_prob(params, action))


def test_the_mirror_loss_is_zero_for_an_equivariant_policy_and_else_the_squared_difference():
    mirror, policy = mirror_of(), torch.nn.Linear(3, 2, bias=False)
    flat = Flat(policy, trained=True)
    state = SimpleNamespace(policy=flat, optimizer=AdamW(flat, 1e-3))
    batch = batch_of(4)._replace(mask=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    settings = SimpleNamespace(symmetry=SimpleNamespace(mirror_coef=2.0))

    def update(state, batch, settings, gen):
        state.optimizer.minimize(policy(batch.obs["policy"]).sum() * 0)
        return {"gradient": flat.data.grad.clone()}

    def loss(weight):
        with torch.no_grad():
            policy.weight.copy_(torch.tensor(weight))
        mean = lambda net, obs: net(obs["policy"])  # noqa: E731
        return with_mirror_loss(update, mean, mirror)(state, batch, settings, torch.Generator())

    assert loss([[0.0, 1.0, 2.0], [0.0, 2.0, 1.0]])["loss/mirror"] == 0
    out = loss([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # a = (o0, 0): the reflection of a is (0, -o0), at M o it is a
    first = batch.obs["policy"][[0, 1, 3], 0]
    torch.testing.assert_close(out["loss/mirror"], first.square().mean())
    torch.testing.assert_close(out["gradient"][0], 2.0 * first.square().mean())  # half of each of two actions
    assert state.optimizer.extra is None


@pytest.mark.parametrize("algo", ["pql2", "pql", "ppo"])
def test_runs_on_reflected_rows(algo):
    """Statistics are symmetric, the loss is logged, and every setting has an effect."""
    small = ["task=swimmer", "num_envs=8", "device=cpu", "placement.executor=inline", f"algo={algo}", "seed=1"]
    if algo == "ppo":
        small += ["algo.horizon=16", "algo.minibatches=2"]
    else:
        small += ["algo.batch_size=32", "algo.warmup_steps=4"]
    made = {}
    for augment, coef in (("off", 0), ("half", 0), ("double", 0), ("double", 1.0)):
        words = [*small, f"algo.symmetry.augment={augment}", f"algo.symmetry.mirror_coef={coef}"]
        parts = go_on(start(compose(words)), 4)
        made[augment, coef] = parts, parts.drain()
        parts.close_envs()
    norm = made["double", 0][0].collector.normalizer
    assert norm.moments["policy"].mean[:3].abs().max() < 1e-12  # all three angles change their sign
    assert made["off", 0][0].collector.normalizer.moments["policy"].mean[:3].abs().min() > 1e-6
    assert made["double", 1.0][1]["loss/mirror"] > 0
    assert "loss/mirror" not in made["double", 0][1]
    states = [bits(parts) for parts, _ in made.values()]
    for i, one in enumerate(states):
        assert not any(differences(one, other) == [] for other in states[i + 1 :])


def test_settings_that_cannot_be_reflected_are_refused():
    with pytest.raises(ConfigError, match=r"algo\.lstm=8: expected null with algo\.symmetry"):
        compose(["task=swimmer", "algo=ppo", "algo.lstm=8", "algo.symmetry.augment=half"])
    with pytest.raises(ConfigError, match="halfcheetah declares no symmetry"):
        start(compose(["task=halfcheetah", "num_envs=4", "device=cpu", "algo=pql2", "algo.symmetry.augment=half"]))
