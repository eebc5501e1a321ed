"""Runs of version 0.1, one of each family, with tiny networks: they are read, resumed, evaluated and exported.

``tests/old_runs`` holds that version's files, and the actions of its policies on four observations. Its checkpoints are
of format 2; ``format1`` is an earlier run.
"""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from run_files import points, rows
from sampling import sample

import pql
from pql.cli.main import main
from pql.config import leaves
from pql.config.migrate import as_trained
from pql.data.replay import converted
from pql.envs.mujoco import Maker
from pql.errors import PqlWarning
from pql.run.export import writer
from pql.run.policy import open_stored
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint, manifest
from pql.run.store import run_dir as rundir
from pql.run.store.run_dir import run_settings

RUNS = Path(__file__).parents[1] / "old_runs"
ACTIONS = json.loads((RUNS / "actions.json").read_text())
STEPS = {"pql": 80, "sac": 80, "ppo": 192, "impala": 192, "dqn": 80, "r2d2": 160, "pqn": 128}
EVERY = pytest.mark.parametrize("name", STEPS)


@pytest.fixture
def run(name, tmp_path):
    """A copy of the stored run, as a user has it."""
    return shutil.copytree(RUNS / name, tmp_path / name)


def actions(policy):
    """The policy's actions on the four observations with which the old version was asked."""
    obs = {}
    for group, spec in policy.spec.obs.items():
        count = 4 * torch.Size(spec.shape).numel()
        obs[group] = torch.linspace(-1, 1, count).reshape(4, *spec.shape).to(spec.dtype)
    return policy(obs)


@EVERY
@pytest.mark.fault(15)
def test_an_old_policy_acts_as_it_did(run, name):
    torch.testing.assert_close(actions(pql.load_policy(run)), torch.tensor(ACTIONS[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.fault(15)
def test_an_old_export_acts_as_it_did():
    policy = pql.load_policy(RUNS / "export" / "policy.pt2", trust=True)
    torch.testing.assert_close(actions(policy), torch.tensor(ACTIONS["export"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sample(STEPS, keep=["sac", "ppo", "dqn", "r2d2"]))
@pytest.mark.fault(15)
def test_an_old_run_is_resumed_evaluated_and_exported(run, name, capsys):
    assert main(["resume", str(run), f"budget.env_steps={STEPS[name] * 2}"]) == 0
    newest = [row for row in rows(run) if "steps/env" in row][-1]
    assert newest["steps/env"] >= 2 * STEPS[name]
    assert main(["eval", str(run), "episodes=2", "num_envs=2"]) == 0
    assert main(["export", str(run), "formats=pt2"]) == 0
    capsys.readouterr()


@pytest.mark.fault(15)
def test_a_resume_point_of_format_1_fills_the_replay_with_the_same_rows(tmp_path):
    """Format 1 stored the whole ring, with rows and final observations in one tensor."""
    folder = shutil.copytree(RUNS / "format1", tmp_path / "run")
    stored, facts = checkpoint.load(points(folder)[0], ("resume",))
    assert (facts["format"], "release" in facts) == (1, False)
    session = Session(resume_config(folder, ["budget.env_steps=164"]), resume=True, quiet=True)
    ring, old = session.parts.collector.replays[0], "collector/replay/0/"
    assert (ring.rows, ring.num_envs) == (32, 2)
    assert torch.equal(ring.obs["policy"], stored[f"{old}obs.policy"][:64])
    for name in ("action", "reward"):
        assert torch.equal(getattr(ring, name), stored[old + name]), name
    assert torch.equal(ring.flags, converted(stored[f"{old}flags"]))
    assert ring.live.head.tolist() == [80, 80]
    assert session.train().env_steps == 164
    tensors, facts = checkpoint.load(points(folder)[-1], ("resume",))
    assert (facts["format"], facts["release"], facts["counters"]["ticks"]) == (2, pql.__version__, 74)
    assert tensors[f"{old}obs.policy"].shape == (64, 4)
    assert not any("final" in name for name in tensors)


@pytest.mark.fault(15)
def test_old_settings_are_migrated(tmp_path):
    """Settings of the family move up into ``algo``; those of other families, which it never read, are dropped."""
    from pql.config import from_dict

    algo = {k: v for k, v in leaves(from_dict(run_settings(RUNS / "ppo"))) if k.startswith("algo.")}
    assert (algo["algo.family"], algo["algo.horizon"], algo["algo.vtrace.enabled"]) == ("ppo", 8, True)
    assert not any(k.startswith(("algo.ppo.", "algo.dqn.", "algo.explore.")) for k in algo)


@pytest.mark.fault(15)
def test_a_run_of_a_task_that_was_redefined_goes_on_in_its_former_form(tmp_path, monkeypatch):
    """Stored by version 0.2.0, whose Ant was another task and had no setting ``legacy``."""
    words = ["task=ant", "task.kwargs.contact_forces=false", "algo=pql2", "scale=cpu", "device=cpu", "num_envs=2"]
    words += ["budget.seconds=null", "algo.warmup_steps=2", "eval.num_envs=1", "eval.max_steps=5", "seed=1"]
    folder = tmp_path / "run"
    with monkeypatch.context() as old:
        for module in (manifest, rundir, writer):
            old.setattr(module, "__version__", "0.2.0")
        now = Maker.variant
        old.setattr(Maker, "variant", lambda self, settings: now(self, replace(settings, legacy=True)))
        pql.train(*words, f"run_dir={folder}", "budget.env_steps=20")
        pql.export_policy(folder, formats=["pt2"])
    about = json.loads((folder / "env.json").read_text())
    del about["release"]  # which that version did not write
    (folder / "env.json").write_text(json.dumps(about))

    assert run_settings(folder)["task"]["kwargs"] == {"contact_forces": False, "legacy": True}
    assert rundir.read_config(folder)["task"] == run_settings(folder)["task"]
    for file in (folder, folder / "export" / "policy.pt2"):
        assert "reward_contact" in open_stored(file, trust=True).make_env(1).spec.log
    with warnings.catch_warnings():
        warnings.simplefilter("error", PqlWarning)
        pql.resume(str(folder), "budget.env_steps=40")
    assert yaml.safe_load((folder / "config.yaml").read_text())["task"]["kwargs"]["legacy"] is True
    stored = checkpoint.load(points(folder)[-1], ("resume",))[1]
    assert (stored["release"], stored["config"]["task"]["kwargs"]["legacy"]) == (pql.__version__, True)


def test_only_redefined_tasks_of_earlier_releases_are_changed():
    ant, hopper = ({"task": {"name": name, "kwargs": {}}} for name in ("ant", "hopper"))
    for release in ("", "0.1.0", "0.2.0"):
        assert as_trained(ant, release) == {"task": {"name": "ant", "kwargs": {"legacy": True}}}
        assert as_trained(hopper, release) is hopper
    chosen = {"task": {"name": "ant", "kwargs": {"legacy": False}}}
    assert as_trained(chosen, "0.2.0") == chosen
    for release in (pql.__version__, "0.3.0", "1.0.0"):
        assert as_trained(ant, release) is ant
