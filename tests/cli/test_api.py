"""Python functions of the commands: the public names of ``pql``, and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import rows, words, write_run

import pql
from pql.api import NAMES_A_TASK
from pql.config.compose import known_settings, parse_words, words_of
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.run.session import Session

NAMES = """
Box Config ConfigError Discrete MultiDiscrete EnvSpec ObsSpec RunError Session Step Summary __version__ check_env
compare drive evaluate export_policy load_policy make_env record_video register register_algorithm report resume train
wrap
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "run"
    pql.train(*words(path), quiet=True)
    return path


def test_all_public_names_show_before_anything_is_loaded():
    code = "import json, sys, pql; print(json.dumps([dir(pql), sorted(pql.__all__), 'torch' in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    shown, public, torch_loaded = json.loads(out)
    assert set(public) == {*NAMES.split()}
    assert set(public) <= set(shown)
    assert not torch_loaded


def test_every_public_name_is_there_and_a_verb_is_a_function():
    for name in pql.__all__:
        assert getattr(pql, name) is not None
    for name in ("train", "resume", "evaluate", "report", "compare"):
        assert getattr(pql, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pql.trian


def test_resume_goes_on_and_evaluate_plays(tmp_path):
    seen = []
    pql.train(*words(tmp_path), quiet=True, callbacks=lambda session, row: seen.append(row["steps/env"]))
    assert seen[-1] == 320  # one function, without a list around it
    summary = pql.resume(tmp_path, {"budget": {"env_steps": 640}}, quiet=True)
    assert summary.env_steps == rows(tmp_path)[-1]["steps/env"] == 640
    before = sorted(tmp_path.rglob("*"))
    found = pql.evaluate(tmp_path, episodes=3, num_envs=2, seed=5)
    assert (found["episodes"], len(found["returns"]), found["lengths"]) == (3, 3, [200.0] * 3)
    assert found == pql.evaluate(str(tmp_path), episodes=3, num_envs=2, seed=5)
    assert sorted(tmp_path.rglob("*")) == before


def test_evaluate_refuses_what_the_command_refuses(trained):
    with pytest.raises(ConfigError, match="episodes=0: expected a number from 1"):
        pql.evaluate(trained, episodes=0)
    with pytest.raises(ConfigError, match="device=cuda:9: expected a device of this machine"):
        pql.evaluate(trained, device="cuda:9")


def test_pages_are_written_from_python_too(tmp_path):
    """The names stay functions once the modules that do the work are loaded."""
    pytest.importorskip("jinja2")
    one, two = (write_run(tmp_path / f"s{seed}", [(1, 16, 5.0), (2, 32, 10.0 * seed)], seed=seed) for seed in (1, 2))
    about = pql.report(one)
    assert about["page"] == str(one / "report" / "index.html")
    assert (one / "report" / "index.html").stat().st_size > 1000
    both = pql.compare(one, two, out=tmp_path / "page", x="env_steps")
    assert both["page"] == str(tmp_path / "page" / "index.html")
    assert [len(g["runs"]) for task in both["tasks"] for g in task["groups"]] == [2]
    assert callable(pql.report)
    assert callable(pql.compare)
    with pytest.raises(ConfigError, match="run=null: expected run directories"):
        pql.compare()
    with pytest.raises(ConfigError, match="x=hours: expected one of"):
        pql.report(one, x="hours")


# -- settings as dicts ----------------------------------------------------------------------------------------------


def test_dicts_are_settings_nested_or_dotted():
    asked = {
        "task": "pendulum",
        "budget": {"seconds": 60, "env_steps": None},
        "algo.critic.hidden": [64, 64],
        "run_dir": Path("a b"),
        "task.kwargs": {"stagger": True, "nested": {"low": 1e-5, "names": ("x", "y z")}},
    }
    presets, values = parse_words(words_of(["seed=1", asked]), known_settings())
    assert presets == {"task": "pendulum"}
    assert values == {
        "seed": 1,
        "budget.seconds": 60,
        "budget.env_steps": None,
        "algo.critic.hidden": [64, 64],
        "run_dir": "a b",
        "task.kwargs.stagger": True,
        "task.kwargs.nested.low": 1e-5,
        "task.kwargs.nested.names": ["x", "y z"],
    }


@pytest.mark.parametrize("text", ["", "x'y", "a\\b", "\\'", "end\\", "e\\\\", "${x}", "a,b", "[1]", "null", '"'])
def test_text_in_a_dict_comes_through_as_it_is(text):
    assert parse_words(words_of([{"run_dir": text}]), ["run_dir"])[1] == {"run_dir": text}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (3, "override=3: expected the form 'key=value', or a dict of settings"),
        ({"task": {"kwargs": {"x": object}}}, "expected null, true, false, a number, text, a list or a dict"),
        ({"budget": {"secnds": 3}}, r"budget.secnds=3: expected a known setting \(did you mean budget.seconds\?\)"),
    ],
)
def test_other_settings_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        pql.train(setting)


# -- objects --------------------------------------------------------------------------------------------------------


def test_a_single_environment_of_gymnasium_is_refused_with_what_to_do():
    gymnasium = pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=r"gymnasium's: 'task=gymnasium', 'task\.id=Pendulum-v1'"):
        pql.train(env=gymnasium.make("Pendulum-v1"))
    with pytest.raises(ConfigError, match=r"env=object: expected a pql\.VecEnv: a spec \(pql\.EnvSpec\), reset, step"):
        pql.train(env=object())


@pytest.mark.parametrize("word", [f"{name}=x" for name in NAMES_A_TASK])
def test_a_task_beside_a_live_environment_is_refused(word):
    with pytest.raises(ConfigError, match="task=x: expected no task together with env="):
        pql.train(word, env=Counter(2))


@pytest.mark.parametrize("callbacks", [3, None, [3], [len, None], ["f"], "f"])
def test_callbacks_that_cannot_be_called_are_refused(callbacks):
    with pytest.raises(ConfigError, match=r"callbacks=\w+: expected functions that take \(session, row\)"):
        Session(None, callbacks=callbacks)  # type: ignore[arg-type]


def test_wrong_callbacks_are_refused_before_the_run_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="callbacks=int: expected functions"):
        pql.train("task=pendulum", callbacks=3)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


class Gymnastic(Counter):
    """Answers as an environment of gymnasium does."""

    def __init__(self, num_envs, device, where="reset"):
        super().__init__(num_envs, device)
        self.where = where

    def reset(self, seed=None):
        obs = super().reset(seed)
        return (obs["policy"], {}) if self.where == "reset" else obs

    def step(self, action):
        step = super().step(action)
        return (*step[:4], {}) if self.where == "step" else step


@pytest.mark.parametrize(("where", "wanted"), [("reset", "dict of observations"), ("step", r"pql\.Step")])
def test_an_environment_that_answers_like_gymnasium_is_refused(tmp_path, where, wanted):
    message = rf"expected {where}\(\) to return a {wanted}, not a tuple, as gymnasium has it: pql doctor --env NAME"
    with pytest.raises(ConfigError, match=message):
        pql.train(*words(tmp_path)[1:], env=Gymnastic(16, "cpu", where), quiet=True)
    pql.register("gymnastic", Gymnastic)
    report = pql.check_env(Gymnastic(4, "cpu", where), steps=8)
    assert {"shapes"} == set(report.failed)


# -- policies -------------------------------------------------------------------------------------------------------


def test_a_policy_takes_arrays_and_numbers_of_any_precision(trained):
    policy = pql.load_policy(trained)
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    action = policy(obs)
    given = policy(obs.numpy())
    assert isinstance(given, np.ndarray)
    assert np.array_equal(given, action.numpy())
    assert np.array_equal(policy({"policy": obs.numpy().astype(np.float64)}), given)
    assert torch.equal(policy(obs.double()), action)


@pytest.mark.parametrize(
    ("obs", "value"),
    [
        (torch.zeros(5, 4), r"\[5, 4\] torch.float32"),
        (np.zeros((2, 2)), r"\[2, 2\] float64"),
        (torch.zeros(3), r"\[3\] torch.float32"),
        ([[0.0, 0.0, 0.0]], "list"),
    ],
)
def test_a_policy_says_what_it_reads(trained, obs, value):
    with pytest.raises(
        ConfigError, match=rf"obs\.policy={value}: expected a tensor or NumPy array \[N, 3\] of float32"
    ):
        pql.load_policy(trained)(obs)


def test_a_policy_of_bytes_does_not_take_numbers(tmp_path):
    small = (
        "task=catch",
        "algo=dqn",
        "num_envs=4",
        "budget.env_steps=200",
        "algo.warmup_steps=8",
        "algo.batch_size=16",
        "eval.final=false",
        "replay.capacity=4096",
        f"run_dir={tmp_path}",
    )
    policy = pql.load_policy(pql.train(*small, quiet=True).run_dir)
    shape = policy.spec.obs["policy"].shape
    assert policy(np.zeros((2, *shape), np.uint8)).dtype == np.int64
    with pytest.raises(ConfigError, match=r"of uint8"):
        policy(np.zeros((2, *shape), np.float32))
