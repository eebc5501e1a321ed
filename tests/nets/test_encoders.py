"""Encoders of images and vectors, and custom networks: shapes, learning, rejected input."""

import importlib.metadata
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import bits, differences, learners, make_networks, small_config, start, ticks
from families import FAMILIES
from run_files import words
from sampling import sample
from torch import nn

import pql
from pql.algos.off_policy import make_critic
from pql.algos.on_policy import make_body
from pql.algos.registry import make_policy
from pql.cli.main import main
from pql.config import EncoderConfig, from_dict, to_dict
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.contract.registry import register
from pql.engine.executors import Inline
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.nets.encoders import Encoder, Pictures
from pql.run.build import build
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import manifest
from pql.run.store.checkpoint import flatten

CPU = torch.device("cpu")
SIDE = 8


class Seek:
    """One-step episodes: a bright column of the image tells one half of the best action, the vector the other.

    The best action is half the column's place in [-1, 1] plus 0.4 times the number, and is worth 0.
    """

    def __init__(self, num_envs, device):
        groups = {"policy": ObsSpec((1,)), "image": ObsSpec((1, SIDE, SIDE), torch.uint8)}
        self.spec = EnvSpec("seek", num_envs, groups, Box(1), CPU, 1)
        self.gen = torch.Generator()

    def _draw(self):
        n = self.spec.num_envs
        column = torch.randint(SIDE, (n,), generator=self.gen)
        sign = torch.randint(2, (n, 1), generator=self.gen).float() * 2 - 1
        image = torch.zeros(n, 1, SIDE, SIDE, dtype=torch.uint8)
        image[torch.arange(n), 0, :, column] = 255
        self.best = 0.4 * sign + 0.5 * (column[:, None] / (SIDE - 1) * 2 - 1)
        return {"policy": sign, "image": image}

    def reset(self, seed=None):
        if seed is not None:
            self.gen.manual_seed(seed)
        self.obs = self._draw()
        return self.obs

    def step(self, action):
        reward, final = -(action - self.best).square()[:, 0], self.obs
        self.obs = self._draw()
        yes = torch.ones(self.spec.num_envs, dtype=torch.bool)
        return pql.Step(self.obs, reward, yes, ~yes, yes, final, yes, yes, {})

    def close(self):
        pass


register("seek", Seek)


def test_policy_and_critic_learn_from_image_and_vector_together(learns):
    learns(lambda seed: -error_after_training(seed), -0.1)  # without the image .29 is the best, without the vector .4


def error_after_training(seed):
    both = {"hidden": [32], "obs": ["policy", "image"], "grad_clip": None}
    config = small_config(
        task={"name": "seek"},
        num_envs=32,
        seed=seed,
        replay={"capacity": 32 * 256},
        algo={
            "encoder": {"channels": [8], "features": 16},
            "critic": both | {"lr": 5e-3},
            "policy": both,
            "n_step": 1,
            "batch_size": 64,
            "v_per_step": 4,
            "p_per_v": 0.5,
        },
    )
    parts = start(config)
    for _ in range(150):
        parts.schedule.tick()
    env = Seek(256, CPU)
    obs = env.reset(5)
    policy = parts.policy.module
    assert policy.groups == ("policy", "image")
    return (policy(parts.collector.normalizer(obs)) - env.best).abs().mean().item()
    assert obs["image"].dtype == torch.uint8
    assert parts.collector.replays[0].obs["image"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 12, 16), torch.uint8), ((12, 16, 3), torch.uint8), ((12, 16), torch.float32), ((5, 5, 5), torch.float32)],
)
def test_images_of_every_layout_become_features_whatever_stands_before_them(shape, dtype):
    torch.manual_seed(0)
    net = Pictures(shape, EncoderConfig("small", [4, 6], 10))
    x = torch.randint(256, (3, 2, *shape)).to(dtype)
    together = net(x)
    assert together.shape == (3, 2, 10)
    torch.testing.assert_close(together[1], net(x[1]))
    assert (net(x[0]) - net(x[1])).abs().max() > 1e-3


def test_channels_first_and_last_are_the_same_picture_and_bytes_are_scaled():
    torch.manual_seed(0)
    first, last = (Pictures(s, EncoderConfig("small", [4], 6)) for s in ((3, 9, 7), (9, 7, 3)))
    last.load_state_dict(first.state_dict())
    x = torch.randint(256, (5, 3, 9, 7), dtype=torch.uint8)
    torch.testing.assert_close(first(x), last(x.permute(0, 2, 3, 1)))
    torch.testing.assert_close(first(x), first(x / 255))


def test_vectors_pass_an_encoder_unchanged_in_the_order_asked_for():
    specs = {"a": ObsSpec((2,)), "b": ObsSpec((3,)), "c": ObsSpec((4, 4), torch.uint8), "d": ObsSpec((1,), torch.uint8)}
    encoder = Encoder(specs, ("b", "d", "a"), EncoderConfig("small", [4], 6))
    assert (encoder.size, encoder.groups) == (6, ("b", "d", "a"))
    assert flatten(encoder.state_dict()) == {}
    obs = {"a": torch.tensor([[1.0, 2]]), "b": torch.tensor([[3.0, 4, 5]]), "d": torch.tensor([[9]], dtype=torch.uint8)}
    assert encoder(obs).tolist() == [[3, 4, 5, 9, 1, 2]]
    assert Encoder(specs, ("b", "c"), EncoderConfig("small", [4], 6)).size == 9


def spec_with(**groups: tuple[int, ...]) -> EnvSpec:
    return EnvSpec("made up", 1, {k: ObsSpec(s) for k, s in groups.items()}, Box(2), CPU)


def test_by_default_each_network_reads_its_own_group_as_before():
    config = small_config()
    policy, critic = make_networks(config, spec_with(policy=(3,), critic=(5,), other=(2, 2, 2, 2)), 0)
    assert (policy.groups, critic.groups) == (("policy",), ("critic",))
    assert policy.encoder is critic.encoder is None
    assert [*policy.state_dict()] == [
        "net.0.weight",
        "net.0.bias",
        "net.2.weight",
        "net.2.bias",
        "net.4.weight",
        "net.4.bias",
    ]
    plain = small_config(algo={"critic": {"obs": ["policy", "critic"]}})
    assert make_critic(plain, spec_with(policy=(3,), critic=(5,))).net[0].weight.shape[1] == 3 + 5 + 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["imag"], r"algo.policy.obs=imag: expected groups of made up: policy, image \(did you mean image\?\)"),
        (["deep"], r"algo.policy.obs=deep: expected groups of made up"),
    ],
)
def test_groups_that_are_not_there_are_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(small_config(algo={"policy": {"obs": groups}}), spec_with(policy=(3,), image=(4, 4)))


def test_groups_of_other_shapes_and_lists_that_are_none_are_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"vectors or images; 'policy' is \[2, 2, 2, 2\]"):
        make_policy(small_config(), spec_with(policy=(2, 2, 2, 2)))
    for word, message in (
        ("algo.policy.obs=[policy,policy]", "expected null, or a list of observation groups, each once"),
        ("algo.policy.obs=policy", "expected a list of names such as [policy,image] or null"),
        ("algo.encoder.channels=[0]", "expected a list of layer widths, each from 1 to 65536"),
        ("algo.encoder.features=-1", "expected a number from 0"),
    ):
        assert main(["train", *words(tmp_path / "run", word)]) == 2
        assert message in capsys.readouterr().err


# -- networks from elsewhere ------------------------------------------------------------------------------------------

MODULE = '''
import torch
from torch import nn

class Bounded(nn.Module):
    """A policy that knows the pendulum: torque from angle and speed."""

    def __init__(self, spec, config):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1, spec.obs["policy"].shape[0]))

    def forward(self, obs):
        return torch.tanh((obs["policy"] * self.gain).sum(1, keepdim=True))

    mean_action = forward

class Features(nn.Module):
    """What PPO takes: features of the observation."""

    def __init__(self, spec, config):
        super().__init__()
        self.layer = nn.Linear(spec.obs["policy"].shape[0], 8)

    def forward(self, obs):
        assert obs["policy"].dim() == 2
        return torch.tanh(self.layer(obs["policy"]))

class Pair(nn.Module):
    def __init__(self, spec, config):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(spec.obs["policy"].shape[0] + spec.action.size, 1) for _ in "ab")

    def forward(self, obs, action):
        x = torch.cat((obs["policy"], action), -1)
        return torch.stack([layer(x).squeeze(-1) for layer in self.layers])

class Normed(Bounded):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.norm = nn.BatchNorm1d(3)

class Flat(Bounded):
    def forward(self, obs):
        return super().forward(obs)[:, 0]

    mean_action = forward

class Empty(nn.Module):
    def __init__(self, spec, config):
        super().__init__()

def broken(spec, config):
    raise RuntimeError("no such layer")
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the working directory, which is not on the import path."""
    (tmp_path / "pql_test_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pql_test_nets", raising=False)
    return "pql_test_nets"


def test_a_run_trains_saves_and_loads_networks_named_in_its_config(module, tmp_path):
    before = list(sys.path)
    more = (f"algo.policy.net={module}:Bounded", f"algo.critic.net={module}:Pair")
    assert main(["train", *words(tmp_path / "run", *more)]) == 0
    assert sys.path == before
    policy = pql.load_policy(tmp_path / "run", trust=True)
    assert type(policy.net).__name__ == "Bounded"
    assert policy.net.gain.abs().max() > 1e-4  # it learned something
    obs = torch.randn(4, 3)
    want = torch.tanh((policy.norm({"policy": obs})["policy"] * policy.net.gain).sum(1, keepdim=True))
    torch.testing.assert_close(policy(obs), want)
    again = words(tmp_path / "other", *more, f"init_from={tmp_path / 'run'}")
    assert main(["train", *again]) == 0
    assert main(["train", *words(tmp_path / "third", more[1], f"init_from={tmp_path / 'run'}")]) == 2


def test_a_saturation_penalty_asks_for_what_ones_own_tanh_takes(module, monkeypatch):
    config = small_config(algo={"policy": {"net": f"{module}:Bounded", "saturation_penalty": 0.1}})
    spec = pql.make_env("pendulum", 1).spec
    allowed = rf"expected 0, or a method before_tanh\(obs\) of algo.policy.net={module}:Bounded whose tanh is forward"
    with pytest.raises(ConfigError, match=rf"algo.policy.saturation_penalty=0.1: {allowed}"):
        make_policy(config, spec)
    own = type(make_policy(small_config(algo={"policy": {"net": f"{module}:Bounded"}}), spec))
    with monkeypatch.context() as patch:  # another squash would train another policy than the one that acts
        patch.setattr(own, "before_tanh", lambda self, obs: 2 * self.forward(obs).atanh(), raising=False)
        with pytest.raises(ConfigError, match=allowed):
            make_policy(config, spec)
    monkeypatch.setattr(own, "before_tanh", lambda self, obs: self.forward(obs).atanh(), raising=False)
    assert isinstance(make_policy(config, spec), own)


def test_ppo_puts_its_heads_on_networks_of_ones_own(module, tmp_path, capsys):
    nets = (f"algo.policy.net={module}:Features", f"algo.critic.net={module}:Features")
    unread = ("algo.batch_size", "replay.capacity")
    left = [w for w in words(tmp_path / "run") if not w.startswith(unread)]
    ppo = [*left, "algo=ppo", "algo.minibatches=2", *nets]
    assert main(["train", *ppo, "budget.env_steps=2000"]) == 0
    policy = pql.load_policy(tmp_path / "run", trust=True)
    obs = torch.randn(5, 3)
    features = torch.tanh(policy.net.body.network.layer(policy.norm({"policy": obs})["policy"]))
    torch.testing.assert_close(policy(obs), policy.net.head(features).clamp(-1, 1))
    for word, name in (("algo.lstm=4", "algo.lstm"), ("algo.shared=true", "algo.critic.net")):
        capsys.readouterr()
        assert main(["train", *ppo, word, f"run_dir={tmp_path / 'no'}"]) == 2
        assert capsys.readouterr().err.startswith(f"pql: {name}=")


def test_a_network_of_ones_own_sees_flat_rows(module):
    config = small_config(algo={"family": "ppo", "critic": {"net": f"{module}:Features"}})
    critic = make_body(config, pql.make_env("pendulum", 1).spec, "critic")
    rows = torch.randn(6, 4, 3)
    assert critic({"policy": rows}).shape == (6, 4, 8)
    torch.testing.assert_close(critic({"policy": rows})[2], critic({"policy": rows[2]}))


def test_installed_packages_offer_networks_by_name(module, monkeypatch, tmp_path):
    entry = importlib.metadata.EntryPoint("bounded", "pql_test_nets:Bounded", "pql.nets")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("pql.nets.encoders.entry_points", lambda group: [entry] if group == "pql.nets" else [])
    spec = spec_with(policy=(3,))
    assert (
        type(
            make_policy(
                small_config(algo={"policy": {"net": "bounded"}}), SimpleNamespace(**{**vars(spec), "action": Box(1)})
            )
        ).__name__
        == "Bounded"
    )
    with pytest.raises(ConfigError, match=r"algo.policy.net=bonded: .*pql.nets \(bounded\) \(did you mean bounded\?\)"):
        make_policy(small_config(algo={"policy": {"net": "bonded"}}), spec)


@pytest.mark.parametrize(
    ("which", "name", "message"),
    [
        ("policy", "nowhere:Net", "the working directory included (No module named 'nowhere')"),
        ("policy", "pql_test_nets:Nett", "the working directory included (module 'pql_test_nets'"),
        ("policy", "nothing", "module:Class, or a name of pql.nets (none is installed)"),
        ("policy", "pql_test_nets:broken", "takes (spec, config): RuntimeError: no such layer"),
        ("policy", "pql_test_nets:Empty", "a torch module with parameters, not Empty"),
        ("policy", "pql_test_nets:Normed", "no BatchNorm (LayerNorm works)"),
        ("policy", "pql_test_nets:Flat", "forward(obs) of shape [2, 1], not [2]"),
        ("policy", "pql_test_nets:Pair", "a policy for pendulum: TypeError"),
        ("critic", "pql_test_nets:Bounded", "a critic for pendulum: TypeError"),
    ],
)
def test_networks_that_cannot_work_are_refused_by_name(module, tmp_path, capsys, which, name, message):
    capsys.readouterr()
    assert main(["train", *words(tmp_path / "run", f"algo.{which}.net={name}")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pql: algo.{which}.net={name}: expected ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("algo", "which", "message"),
    [
        ({"family": "sac", "policy": {"net": "pql_test_nets:Bounded"}}, "policy", "mean of shape [2, 1], not [1]"),
        ({"critic": {"net": "pql_test_nets:Pair", "atoms": 11}}, "critic", "of shape [E, 2, 11], not [2, 2]"),
    ],
)
def test_outputs_must_fit_the_algorithm(module, algo, which, message):
    spec = pql.make_env("pendulum", 1).spec
    with pytest.raises(ConfigError) as caught:
        (make_policy if which == "policy" else make_critic)(small_config(algo=algo), spec)
    assert message in str(caught.value)


def test_policies_that_read_images_export(tmp_path):
    pytest.importorskip("onnxscript")
    both = {"hidden": [8], "obs": ["policy", "image"]}
    config = small_config(task={"name": "seek"}, algo={"encoder": {"channels": [4], "features": 6}, "policy": both})
    from pql.config import to_dict
    from pql.run.export.writer import export_metadata, write_export
    from pql.run.policy import fresh_policy

    policy = fresh_policy(config, Seek(1, CPU).spec, CPU)
    metadata = export_metadata(policy, {"config": to_dict(config)}, Path("a/b/c"), scale=True)
    assert [(i["name"], i["shape"], i["dtype"]) for i in metadata["inputs"]] == [
        ("obs.policy", ["batch", 1], "float32"),
        ("obs.image", ["batch", 1, SIDE, SIDE], "uint8"),
    ]
    out = write_export(policy, metadata, tmp_path, ("onnx",))
    obs = Seek(5, CPU).reset(0)
    for file in out.files.values():
        torch.testing.assert_close(pql.load_policy(file)(obs), policy(obs), atol=1e-5, rtol=0)
    assert from_dict(to_dict(config)) == config
    assert isinstance(policy.net, nn.Module)


def test_the_documented_network_trains(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()
    (tmp_path / "documented_nets.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    run = pql.train(*words(tmp_path / "run", "algo.policy.net=documented_nets:MyPolicy"), quiet=True)
    assert type(pql.load_policy(run.run_dir, trust=True).net).__name__ == "MyPolicy"


# -- numbers of other types -----------------------------------------------------------------------------------------


class Typed(Counter):
    """The counter, whose numbers have another type; images have one row of them."""

    def __init__(self, num_envs, dtype, discrete=False, image=False):
        super().__init__(num_envs, stagger=True)
        shape = (1, 2) if image else (2,)
        action = Discrete(3) if discrete else self.spec.action
        self.spec = replace(self.spec, obs={"policy": ObsSpec(shape, dtype)}, action=action)

    def _typed(self, obs):
        part = self.spec.obs["policy"]
        return {"policy": obs["policy"].reshape(-1, *part.shape).to(part.dtype)}

    def reset(self, seed=None):
        return self._typed(super().reset(seed))

    def step(self, action):
        step = super().step(action)
        return step._replace(obs=self._typed(step.obs), final_obs=self._typed(step.final_obs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["pql", "rainbow", "ppo, lstm", "impala, lstm", "r2d2", "pqn", "reppo"])
def test_a_run_on_whole_numbers_is_the_one_on_the_same_floats(family, dtype):
    config = FAMILIES[family]
    discrete = config.algo.family in ("dqn", "r2d2", "pqn")
    trained = []
    for kind in (torch.float32, dtype):
        parts = build(config, Typed(8, kind, discrete), executor=Inline())
        parts.start()
        parts.warm_up(config.algo.warmup_steps)
        parts.begin()
        trained.append(learners(bits(ticks(parts, 4))))
    assert differences(*trained) == []


SOME = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "normalize"),
    sample(itertools.product(SOME, ("true", "false")), keep=[(torch.uint8, "true"), (torch.int64, "false")]),
)
def test_policies_on_whole_numbers_load_and_leave_with_their_scaling(tmp_path, dtype, normalize):
    run = pql.train(*words(tmp_path / "run", f"algo.normalize_obs={normalize}")[1:], env=Typed(16, dtype), quiet=True)
    policy, first = pql.load_policy(run.run_dir), []
    layer = next(m for m in policy.net.modules() if isinstance(m, nn.Linear))
    layer.register_forward_pre_hook(lambda m, x: first.append(x[0]))
    largest = torch.full((1, 2), 1 if dtype == torch.bool else 127 if dtype == torch.int8 else 255).to(dtype)
    action = policy(largest)
    bound = 5.0 if normalize == "true" else 1.0 if dtype in (torch.uint8, torch.bool) else 255.0
    assert 0 < first[0].max() <= bound
    assert first[0].dtype == torch.float32
    for file in pql.export_policy(run.run_dir).files.values():  # each has been compared on 1,000 rows
        loaded = pql.load_policy(file, trust=True)
        assert loaded.metadata["inputs"][0]["dtype"] == str(dtype).removeprefix("torch.")
        torch.testing.assert_close(loaded(largest), action)


def test_images_of_whole_numbers_are_normalised_and_those_of_bytes_scaled():
    config = small_config(algo={"encoder": {"kind": "small", "channels": [2], "features": 3}})
    for dtype, read in ((torch.int16, torch.float32), (torch.bool, torch.float32), (torch.uint8, torch.uint8)):
        parts = build(config, Typed(8, dtype, image=True), executor=Inline())
        parts.start()
        seen = parts.collector.normalizer(parts.collector.obs)["policy"]
        assert seen.dtype == read
        ticks(parts, 1)


LOOKUP = """
from torch import nn, tanh

class Table(nn.Module):
    def __init__(self, spec, config):
        super().__init__()
        self.table = nn.Embedding(64, spec.action.size)

    def forward(self, obs):
        return tanh(self.table(obs["policy"]).sum(1))

    mean_action = forward
"""


def test_whole_numbers_reach_an_embedding_as_they_are_if_asked(tmp_path, monkeypatch):
    (tmp_path / "pql_test_table.py").write_text(LOOKUP)
    monkeypatch.chdir(tmp_path)
    more = ["algo.policy.net=pql_test_table:Table", "algo.normalize_integers=false"]
    env = Typed(16, torch.int64)
    run = pql.train(*words(tmp_path / "run", *more)[1:], env=env, quiet=True)
    policy = pql.load_policy(run.run_dir, trust=True)
    given = torch.tensor([[3, 5]])
    assert torch.equal(policy(given), policy.net({"policy": given}))


def test_runs_from_before_whole_numbers_were_normalised_act_as_they_did(tmp_path, monkeypatch):
    """Their settings lack the switch, and their statistics the group."""
    old = tmp_path / "old"

    def without(config):
        found = to_dict(config)
        return {**found, "algo": {k: v for k, v in found["algo"].items() if k != "normalize_integers"}}

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "to_dict", without)
        pql.train(*words(old, "algo.normalize_integers=false")[1:], env=Typed(16, torch.uint8), quiet=True)
    settings = old / "config.yaml"
    settings.write_text(settings.read_text().replace("  normalize_integers: false\n", ""))
    assert "normalize_integers" not in settings.read_text() + (old / "checkpoints/last/manifest.json").read_text()
    obs = torch.randint(256, (4, 2), dtype=torch.uint8)
    policy = pql.load_policy(old)
    assert list(policy.norm.moments) == []
    assert torch.equal(policy(obs), policy.net.mean_action({"policy": obs.float()}))
    config = resume_config(old, ["budget.env_steps=1600"])
    assert config.algo.normalize_integers is False
    assert Session(config, resume=True, quiet=True, env=Typed(16, torch.uint8)).train().env_steps == 1600
    assert from_dict({"algo": {"family": "sac"}}).algo.normalize_integers is True


def test_weights_of_older_runs_on_floats_start_new_ones(tmp_path):
    main(["train", *words(tmp_path / "old", "algo.normalize_integers=false")])
    assert main(["train", *words(tmp_path / "new", f"init_from={tmp_path / 'old'}")]) == 0
    raw = words(tmp_path / "raw", "algo.normalize_integers=false")[1:]
    run = pql.train(*raw, env=Typed(16, torch.uint8), quiet=True)
    with pytest.raises(ConfigError, match=r"algo\.normalize_integers=true: expected false, as in init_from="):
        pql.train(*words(tmp_path / "x", f"init_from={run.run_dir}")[1:], env=Typed(16, torch.uint8), quiet=True)
