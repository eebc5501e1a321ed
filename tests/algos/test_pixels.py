"""Off-policy actor-critics on images: an encoder shared by policy and critics, augmented batches, settings refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import bits, configured, differences, go_on, start, ticks
from dial import PIXELS, RECIPES, Dial
from run_files import points, words
from torch import Generator, nn
from torch.nn import functional as F

import pql
from pql.algos.off_policy import check_images
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.data.augment import Augment
from pql.engine.executors import Inline, Threads
from pql.errors import ConfigError
from pql.nets.layers import batch_norms
from pql.run.policy import load_policy
from pql.run.session import Session
from pql.run.store import checkpoint

ORDERS = list(itertools.permutations(("collector", "v", "p")))
SCHEDULES = ("lockstep", "concurrent")
CPU = torch.device("cpu")


def config_of(recipe="squint", *changes):
    return configured(PIXELS, RECIPES[recipe], *changes)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.encoder.parameters()])


# -- one encoder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policy_has_the_critics_encoder_of_the_tick_before(recipe, schedule):
    """In lockstep policies are updated after the critics, so theirs is the newest."""
    parts = start(config_of(recipe, {"schedule": schedule}), Inline())
    v, p = parts.learners["v"], parts.learners["p"]
    critic, policy = v.state.critic.module, parts.policy.module
    before = past = weights(critic)
    readers = [policy, p.state.target.module] if recipe == "a target policy" else [policy]
    for net in (*readers, p.state.critic, v.state.policy, parts.collector.actor.policy):
        assert torch.equal(weights(net), before)
    heads = policy.net[-1].weight.detach().clone()
    for _ in range(6):
        ticks(parts, 1)
        now = weights(critic)
        assert not torch.equal(now, before)
        for net in readers:
            assert torch.equal(weights(net), before if schedule == "concurrent" else now)
        assert torch.equal(weights(parts.collector.actor.policy), past if schedule == "concurrent" else before)
        before, past = now, before
    assert not torch.equal(policy.net[-1].weight, heads)
    obs, policy.amp = parts.env.reset(3), False
    assert torch.equal(policy.mean_action(obs), acted(policy, p.state.critic, obs))


def acted(policy, critic, obs):
    """The action of ``policy``, on features of the critic's encoder."""
    out = policy.net(critic.encoder.pictures["policy"](obs["policy"]))
    return torch.tanh(out[:, :1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_of_the_policy_leave_the_encoder_alone(recipe):
    parts = start(config_of(recipe, {"policy": {"weight_decay": 0.1, "lr": 0.01}}), Inline())
    one = parts.learners["p"]
    policy, flat = parts.policy.module, parts.policy
    shared = [*policy.encoder.parameters()]
    encoder, head = weights(policy), flat.data.detach().clone()
    assert flat.data.numel() == sum(p.numel() for p in policy.net.parameters())
    assert {id(p) for p in shared} == {id(p) for p in flat.tensors()[-len(shared) :]}
    for batch in one.draw(3, one.gen):
        one.update(one.state, batch, one.settings, one.gen)
    assert torch.equal(weights(policy), encoder)
    assert not torch.equal(flat.data, head)
    assert [p for p in shared if p.grad is not None or p.requires_grad] == []
    assert bool(batch_norms(policy)) == (len(flat.tensors()) > 1 + len(shared))


def test_orthogonal_weights_are_those_of_the_encoder_too():
    critic = start(config_of("squint"), Inline()).learners["v"].state.critic.module
    layers = [m for m in critic.encoder.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 3
    for layer in layers:
        rows = layer.weight.flatten(1)
        rows = rows if len(rows) <= rows.shape[1] else rows.T
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def test_by_default_the_policy_has_an_encoder_of_its_own():
    parts = ticks(start(config_of("squint", {"policy": {"encoder": "own"}}), Inline()), 2)
    policy, flat = parts.policy.module, parts.policy
    assert len(flat.tensors()) == 1
    assert flat.data.numel() == sum(p.numel() for p in policy.parameters())
    assert not torch.equal(weights(policy), weights(parts.learners["p"].state.critic))


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_order_of_workers_and_threads_give_the_same_bits(recipe):
    config = config_of(recipe, {"schedule": "concurrent"})
    reference = bits(go_on(start(config, Inline(ORDERS[0])), 12))
    for order in ORDERS[1:]:
        assert differences(reference, bits(go_on(start(config, Inline(order)), 12))) == [], order
    assert differences(reference, bits(go_on(start(config, Threads(("collector", "v", "p"))), 12))) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_is_the_one_that_was_not(recipe, schedule):
    config = config_of(recipe, {"schedule": schedule})
    whole, halves = (start(config, Inline()) for _ in range(2))
    ticks(whole, 5)
    halves.load_state_dict(whole.state_dict(), 5)
    for parts in (whole, halves):
        ticks(parts, 5)
    assert differences(bits(whole), bits(halves)) == []


def train(folder, *more):
    """A run of 25 ticks with the preset, in which the policy reads 12 x 12 pixels."""
    sizes = ("algo.encoder.size=10", "algo.encoder.channels=[4,4]", "algo.encoder.shift=1", "algo.critic.obs=[policy]")
    task = ("task=env", "task.name=dial", "algo=squint", *sizes, "budget.env_steps=528")
    said = [word for word in words(folder, *task, *more) if word != "task=pendulum"]
    Session(compose(said), quiet=True).train()


def test_a_run_is_loaded_and_exported_with_the_encoder(tmp_path):
    train(tmp_path)
    policy = load_policy(tmp_path / "checkpoints" / "last")
    tensors = checkpoint.load(points(tmp_path)[-1])[0]
    obs = Dial(5).reset(0)["policy"]
    out = pql.export_policy(tmp_path, formats=["pt2"])
    torch.testing.assert_close(load_policy(out.files["pt2"], trust=True)(obs), policy(obs))
    name = "encoder.pictures.policy.net.0.weight"  # in lockstep, the newest of the critics
    assert torch.equal(tensors[f"learners/p/state/policy/{name}"], tensors[f"learners/v/state/critic/{name}"])
    assert not torch.equal(tensors[f"learners/p/state/policy/{name}"], tensors[f"learners/v/state/target/{name}"])


def test_a_run_starts_from_the_weights_of_another_but_not_from_those_of_its_policy(tmp_path):
    train(tmp_path / "one")
    train(tmp_path / "two", f"init_from={points(tmp_path / 'one')[-1]}")
    with pytest.raises(ConfigError, match=r"expected a run with a resume point: its critics have the encoder"):
        train(tmp_path / "three", f"init_from={tmp_path / 'one' / 'checkpoints' / 'last'}")


# -- augmented batches ------------------------------------------------------------------------------------------------


def crops(image, most):
    padded = F.pad(image.float().unsqueeze(0), [most] * 4, mode="replicate")[0].to(image.dtype)
    steps = range(2 * most + 1)
    rows, columns = image.shape[1:]
    return [padded[:, i : i + rows, j : j + columns] for i in steps for j in steps]


@pytest.mark.parametrize("worker", ["v", "p"])
def test_batches_have_shifted_images_of_their_rows(worker):
    """The rows themselves are those drawn without augmentation."""
    parts = ticks(start(config_of("squint", {"encoder": {"jitter": 0.0}}), Inline()), 2)
    moved = parts.learners[worker].draw
    plain = replace(moved, augment=Augment({}, 0, 0.0))
    (a,), (b,) = (draw(1, Generator().manual_seed(5)) for draw in (plain, moved))
    assert a.obs["policy"].shape[1:] == (1, 10, 10)  # as the replay stores them
    names = ("obs", "next_obs") if worker == "v" else ("obs",)
    for name in names:
        before, after = getattr(a, name), getattr(b, name)
        assert torch.equal(before["critic"], after["critic"])
        assert not torch.equal(before["policy"], after["policy"])
        for image, got in zip(before["policy"], after["policy"], strict=True):
            assert any(torch.equal(got, crop) for crop in crops(image, 2))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("dqn", {}),
        (
            "r2d2",
            {"lstm": 8, "length": 4, "burn_in": 2, "period": 2, "n_step": 2, "warmup_steps": 40, "target_period": 128},
        ),
    ],
)
def test_value_learners_read_reduced_images_too(name, more):
    encoder = {"kind": "small", "channels": [4], "features": 6, "size": 5}
    base = {"task": {"name": "catch"}, "algo": {"family": name, "encoder": encoder, "critic": {"hidden": [8]}, **more}}
    parts = ticks(start(configured(base), Inline()), 3)
    (ring,) = parts.collector.replays
    whole = parts.env.spec.obs["policy"]
    assert whole.shape[-2:] != (5, 5)
    assert ring.obs["policy"].shape[-2:] == (5, 5)
    assert ring.obs["policy"].any()


# -- settings ---------------------------------------------------------------------------------------------------------


IMAGES = {"policy": ObsSpec((3, 20, 20), torch.uint8), "depth": ObsSpec((16, 20)), "critic": ObsSpec((5,))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"critic": {"obs": ["critic"]}},
            "algo.policy.encoder=critic: expected own, or the same images for both: the policy reads policy, the "
            "critic none (algo.policy.obs, algo.critic.obs)",
        ),
        (
            {"critic": {"obs": ["policy", "depth", "critic"]}},
            "algo.policy.encoder=critic: expected own, or the same images for both: the policy reads policy, the "
            "critic depth, policy (algo.policy.obs, algo.critic.obs)",
        ),
        ({"encoder": {"shift": 10}}, "algo.encoder.shift=10: expected below 10: 'policy' is stored as [3, 10, 10]"),
        (
            {"encoder": {"shift": 16, "size": None}},
            "algo.encoder.shift=16: expected below 16: 'depth' is stored as [16, 20]",
        ),
        (
            {"encoder": {"shift": 0, "jitter": 0.3}},
            "algo.encoder.jitter=0.3: expected 0: 'depth' is float32, not bytes (uint8)",
        ),
    ],
)
def test_images_that_do_not_fit_the_settings_are_refused(change, message):
    base = {"encoder": {"jitter": 0.0}}
    with pytest.raises(ConfigError) as caught:
        check_images(config_of("squint", base, change), EnvSpec("made up", 8, IMAGES, Box(2), CPU))
    assert str(caught.value) == message


@pytest.mark.parametrize("which", ["policy", "critic"])
def test_a_custom_network_cannot_share_an_encoder(which):
    with pytest.raises(ConfigError) as caught:
        config_of("squint", {which: {"net": "my:Net"}})
    assert (
        str(caught.value) == f"algo.policy.encoder=critic: expected own with the custom network algo.{which}.net=my:Net"
    )


def test_the_order_of_groups_does_not_matter():
    spec = EnvSpec("made up", 8, IMAGES, Box(2), CPU)
    groups = {"policy": {"obs": ["depth", "policy"]}, "critic": {"obs": ["policy", "critic", "depth"]}}
    check_images(config_of("squint", {"encoder": {"jitter": 0.0}}, groups), spec)
