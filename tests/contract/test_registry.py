"""Simulators and networks by ``module:attribute``, including modules in the working directory."""

import sys

import pytest
from run_files import WORDS

import pql
from pql.cli.main import main
from pql.contract.registry import find_factory, import_name
from pql.errors import ConfigError

SIM = """
from pql.envs.toy import Counter

class Sims:
    class Chase(Counter):
        pass

def broken(device):
    pass

def gymnastic(num_envs, device):
    class Env:
        action_space = None
    return Env()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a simulator, which no path leads to."""
    (tmp_path / "pql_test_sim.py").write_text(SIM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pql_test_sim", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("pql_test_sim", None)


def test_a_simulator_of_the_working_directory_trains_and_is_checked(here, capsys):
    before = list(sys.path)
    more = ("task=env", "task.name=pql_test_sim:Sims.Chase", "run_dir=run")
    assert pql.train(*WORDS, *more, quiet=True).env_steps == 320
    assert sys.path == before
    assert pql.evaluate("run", episodes=1, trust=True)["task"] == "pql_test_sim:Sims.Chase"
    assert main(["doctor", "--env", "pql_test_sim:Sims.Chase", "--num-envs", "2", "--steps", "12"]) == 0
    assert "conforms" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_so_is_one_in_a_process_of_its_own(capsys):
    command = ["doctor", "--env", "pql_test_sim:Sims.Chase", "--num-envs", "2", "--steps", "12"]
    assert main([*command, f"task.process.python={sys.executable}"]) == 0
    assert "conforms" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pql_test_sim:Chase", r"task=pql_test_sim:Chase: expected module:attribute .*working directory.* 'Chase'"),
        ("nowhere_at_all:Chase", r"expected module:attribute .* \(No module named 'nowhere_at_all'\)"),
        (":Chase", r"task=:Chase: expected module:attribute"),
        ("pql_test_sim:broken", r"a factory that takes \(num_envs, device\): got an unexpected keyword argument"),
        ("pql_test_sim:gymnastic", r"a pql\.VecEnv; Env is gymnasium's: 'task=gymnasium', 'task\.id=Pendulum-v1'"),
    ],
)
def test_what_cannot_be_a_simulator_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        pql.make_env(name, 2)


@pytest.mark.usefixtures("here")
def test_networks_are_found_by_the_same_rule():
    assert import_name("algo.policy.net", "pql_test_sim:Sims.Chase") is find_factory("pql_test_sim:Sims.Chase")
