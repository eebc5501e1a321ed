"""Algorithms of an installed package (tests/packages): one module and one YAML file each, no change in pql."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import differences
from run_files import points, rows

import pql
from pql.algos.ddpg import FAMILY as BUILT_IN_DDPG
from pql.cli.completion import candidates
from pql.cli.main import main
from pql.cli.parser import COMMANDS
from pql.config import DdpgConfig
from pql.config.compose import compose
from pql.config.families import own
from pql.config.fields import setting
from pql.config.layers import Presets
from pql.errors import ConfigError
from pql.run.store import checkpoint

PACKAGES = Path(__file__).parents[1] / "packages"
TINY = ("num_envs=8", "algo.critic.hidden=[8]", "algo.policy.hidden=[8]")
SMALL = {
    "redq": ("algo=redq", "task=pendulum", *TINY, "algo.batch_size=16", "budget.env_steps=400"),
    "reinforce": ("algo=reinforce", "task=cartpole", *TINY, "algo.horizon=8", "budget.env_steps=600"),
}
EVERY = pytest.mark.parametrize("algo", SMALL)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))


def words(run_dir, algo, *more):
    off = ("eval.every_seconds=null", "eval.num_envs=2", "checkpoint.every_seconds=null", "logger.every_seconds=1e-6")
    return ["device=cpu", *SMALL[algo], *off, f"run_dir={run_dir}", *more]


def tensors(run_dir):
    """Of the newest resume point."""
    return checkpoint.load(points(run_dir)[-1])[0]


@EVERY
def test_it_trains_resumes_evaluates_and_is_exported(algo, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["train", *words(one, algo)]) == 0
    last = rows(one)[-1]
    assert last["eval/length_mean"] > 0
    assert main(["eval", str(one), "num_envs=2"]) == 0
    assert main(["export", str(one), "formats=pt2"]) == 0
    obs = {"policy": torch.randn(4, {"redq": 3, "reinforce": 4}[algo])}
    stored, exported = pql.load_policy(one), pql.load_policy(one / "export" / "policy.pt2", trust=True)
    assert torch.allclose(stored(obs).float(), exported(obs).float(), atol=1e-5)
    more = int(SMALL[algo][-1].partition("=")[2]) * 2
    assert main(["resume", str(one), f"budget.env_steps={more}"]) == 0
    assert main(["train", *words(two, algo, f"budget.env_steps={more}")]) == 0
    # resumed == uninterrupted, and the same seed gives the same bits
    assert differences(tensors(one), tensors(two)) == []
    assert main(["compare", str(one), str(two), f"out={tmp_path / 'report'}"]) == 0
    capsys.readouterr()


def test_both_schedules_and_one_where_only_one_is_allowed(tmp_path, capsys):
    assert main(["train", *words(tmp_path / "a", "redq", "algo.schedule=concurrent")]) == 0
    assert main(["train", *words(tmp_path / "b", "reinforce", "algo.schedule=concurrent")]) == 2
    assert "algo.schedule=concurrent: expected one of lockstep" in capsys.readouterr().err


def test_its_settings_are_known_by_name():
    config = compose(["device=cpu", "algo=redq", "task=pendulum", "algo.subset=3"])
    assert (config.algo.family, config.num_envs) == ("redq", 16)
    from extra_algorithms.redq import RedqConfig

    assert own(config, RedqConfig).subset == 3
    for word, message in (
        ("algo.subset=9", "algo.subset=9: expected at most algo.critic.ensemble=5"),
        ("algo.subset=0", "algo.subset=0: expected a number from 1 up to 100"),
        ("algo.subst=2", "algo.subst=2: expected a known setting (did you mean algo.subset?)"),
        ("scale=gpu", "scale=gpu: expected one of cpu: algo=redq has no settings for another"),
    ):
        with pytest.raises(ConfigError) as error:
            compose(["device=cpu", "algo=redq", "task=pendulum", word])
        assert str(error.value) == message


@EVERY
def test_it_is_listed_and_completed(algo, capsys):
    assert algo in Presets().names("algo")
    assert main(["list", "algos"]) == 0
    assert algo in capsys.readouterr().out
    assert f"algo={algo}" in candidates(f"pql train algo={algo[:3]}", COMMANDS)
    assert "algo.gamma=" in candidates(f"pql train algo={algo} algo.ga", COMMANDS)


def test_completion_loads_no_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "extra_algorithms.redq", raising=False)
    candidates("pql train algo=redq algo.", COMMANDS)
    assert "extra_algorithms.redq" not in sys.modules


def test_a_family_can_be_registered_in_python(tmp_path):
    from extra_algorithms.redq import FAMILY, RedqConfig

    from pql.algos.registry import register_algorithm
    from pql.config import families
    from pql.config.layers import registered

    try:
        register_algorithm(FAMILY, {"n_step": 1, "subset": 1, "scales": {"cpu": {"num_envs": 4}}})
        assert own(compose(["device=cpu", "algo=redq", "task=pendulum"]), RedqConfig).subset == 2  # the file is first
    finally:
        families.registered.pop("redq")
        registered.pop("redq")


def test_a_built_in_family_is_not_replaced():
    """A record that only adds a setting to DDPG's has DDPG's name, too."""

    @dataclass(frozen=True)
    class Nameless(DdpgConfig):
        target_noise: float = setting(0.2, "Standard deviation of the noise on target actions.", low=0, high=10)

    family = dataclasses.replace(BUILT_IN_DDPG, settings=Nameless)
    with pytest.raises(ConfigError, match=r"family=ddpg: expected a name that no built-in family has"):
        pql.register_algorithm(family)
    assert compose(["algo=pql", "device=cpu"]).algo.__class__ is DdpgConfig
