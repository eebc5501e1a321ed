"""A run directory with a damaged config.yaml or policy: which file is used instead, and the warning."""

import dataclasses
import os
import random
import re
import shutil
import warnings

import pytest
import torch
from conftest import small_config
from run_files import points, resume, run, words

from pql.cli.main import main
from pql.config import changed, from_dict
from pql.config.compose import compose
from pql.config.files import read_yaml
from pql.contract.env import Box
from pql.engine.world import World
from pql.envs.toy import Counter
from pql.errors import ConfigError, PqlWarning
from pql.run.log import sinks
from pql.run.policy import load_policy, open_stored
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint
from pql.run.store import run_dir as rundir
from pql.run.store.checkpoint import CorruptCheckpointError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with two resume points, a last and a best policy."""
    folder = tmp_path_factory.mktemp("made") / "run"
    run(*words(folder, "eval.final=true", "checkpoint.every_seconds=1e-9"))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def resumed(folder):
    return dataclasses.replace(resume_config(folder, []), run_dir=None)


# -- config.yaml ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(34, cases=(20, 200))
def test_no_flipped_bit_in_config_yaml_makes_it_another_run_or_ends_it(folder, cases):
    good, rng = (folder / "config.yaml").read_bytes(), random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = rundir.run_settings(folder)
    config = resumed(folder)
    meant, told = rundir.read_config(folder), 0
    for trial in range(cases):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / "config.yaml").write_bytes(data)
        try:
            # The run's location is known from where it was found.
            other = rundir.read_config(folder) | {"run_dir": meant["run_dir"]} != meant
        except ConfigError:
            other = True
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert rundir.run_settings(folder) == want
            assert trial % 20 or resumed(folder) == config
        messages = {str(w.message) for w in found if issubclass(w.category, PqlWarning)}
        assert len(messages) == other, (messages, data)
        told += other
    assert told > 0.7 * cases


@pytest.mark.fault(34)
def test_a_run_without_its_config_yaml_goes_on_and_writes_it_anew(folder):
    before = (folder / "config.yaml").read_text()
    (folder / "config.yaml").unlink()
    assert rundir.state(folder) == "finished"
    with pytest.raises(ConfigError, match="a new folder; to continue this run: pql resume"):
        rundir.check_new(folder)
    with pytest.warns(PqlWarning, match=r"readable config.yaml .*: the settings in its newest resume point are used"):
        summary = resume(folder, "budget.env_steps=640")
    assert summary.env_steps == 640
    want = before.replace("env_steps: 320", "env_steps: 640").splitlines()
    after = (folder / "config.yaml").read_text().splitlines()
    assert [a for a, b in zip(after, want, strict=True) if a != b] == [f"run_dir: {folder}"]


def test_what_people_write_into_config_yaml_is_named_and_does_not_count(folder):
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("gamma: 0.99", "gamma: 0.5").replace("seed: 0", "seed: 9"))
    want = r"config\.yaml differs from the run in algo\.gamma, seed: the settings in its resume point are used"
    with pytest.warns(PqlWarning, match=want):
        config = resume_config(folder, [])
    assert (config.algo.gamma, config.seed) == (0.99, 0)


def test_the_manifest_before_counts_where_the_newest_is_damaged(folder):
    (points(folder)[-1] / "manifest.json").write_text("{")
    (folder / "config.yaml").write_text("")
    with pytest.warns(PqlWarning, match="the settings in its newest resume point are used"):
        assert resume_config(folder, []).num_envs == 16
    for path in points(folder):
        shutil.rmtree(path)
    with pytest.raises(ConfigError, match=r"expected a run directory, with a readable config\.yaml"):
        resume_config(folder, [])


@pytest.mark.fault(11)
def test_a_new_budget_outlives_a_sitting_that_was_killed_before_it_saved(folder):
    before = {p.name: checkpoint.load(p) for p in points(folder)}
    Session(resume_config(folder, ["budget.env_steps=640"]), resume=True, quiet=True).closing.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume_config(folder, []).budget.env_steps == 640
    for path in points(folder):
        tensors, manifest = checkpoint.load(path)  # intact, and equal except for the config
        assert all(torch.equal(v, before[path.name][0][k]) for k, v in tensors.items())
        known = before[path.name][1]
        assert {k for k in known if manifest[k] != known[k]} == {"config", "manifest_sha256"}
    assert resume(folder).env_steps == 640


@pytest.mark.fault(11)
@pytest.mark.parametrize("stage", ["a half deleted point", "rotation", "the settings of a resumed run"])
def test_a_run_that_was_killed_at_any_stage_resumes(folder, monkeypatch, stage):
    class Killed(BaseException):
        pass

    def half(path, **options):
        (path / "manifest.json").unlink()
        raise Killed

    def die(path):
        raise Killed

    oldest, newest = points(folder)
    with monkeypatch.context() as patch:
        if stage == "a half deleted point":  # as older releases left them
            (oldest / "manifest.json").unlink()
        elif stage == "rotation":
            patch.setattr(shutil, "rmtree", half)
            with pytest.raises(Killed):
                checkpoint.rotate(folder / "checkpoints", 1)
        else:
            patch.setattr(checkpoint, "sync", die)
            with pytest.raises(Killed):
                Session(resume_config(folder, ["budget.env_steps=640"]), resume=True, quiet=True)
    assert resume(folder, "budget.env_steps=640").env_steps == 640
    assert points(folder)[-1].name > newest.name


@pytest.mark.fault(13)
def test_resuming_on_a_full_disk_says_so_and_changes_nothing(folder, monkeypatch, capsys):
    """The disk is full while metrics.jsonl is rewritten without the rows that will come again."""

    def content():
        return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    before = content()
    with monkeypatch.context() as patch:
        patch.setattr(sinks, "create_file", lambda path, text: (path.touch(), os.close(-1)))
        assert main(["resume", str(folder), "budget.env_steps=640"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"pql: run_dir={folder}: expected a folder that can be written ([Errno 9] ")
    assert errors.count("\n") == 1
    assert content() == before
    assert resume(folder, "budget.env_steps=640").env_steps == 640


@pytest.mark.fault(34)
@pytest.mark.parametrize("text", ["3", "{a: 1}", "text", "[", "\x00"])
def test_a_damaged_overrides_yaml_does_not_end_a_run(folder, text):
    (folder / "overrides.yaml").write_text(text)
    rundir.amend_config(folder, from_dict(rundir.read_config(folder)), ["budget.env_steps=640"])
    assert read_yaml(folder / "overrides.yaml") == ["budget.env_steps=640"]


def test_config_yaml_is_on_the_disk_when_a_run_begins(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    rundir.create_run_dir(tmp_path / "run", compose(words(tmp_path / "run")), [])
    assert synced == [str(tmp_path / "run" / "config.yaml"), str(tmp_path / "run")]


# -- what could not be read again -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("logger.project", "a\tb", r"expected a value that checkpoints can store (logger.project is not without "),
        ("run_dir", "{folder}/ru\u200en", r"/ru\u200en: expected a value that checkpoints can store "),
        ("task.kwargs", {"camera": {"name": "a\x1b"}}, r"task.kwargs={'camera': {'name': 'a\x1b'}}: expected a value "),
        ("task.kwargs", {"gain": float("nan")}, "task.kwargs={'gain': nan}: expected a value that checkpoints can "),
        ("task.kwargs", {"gains": {1: 0.5}}, "task.kwargs={'gains': {1: 0.5}}: expected a value that checkpoints can "),
        ("logger.project", "a${b}", "logger.project=a${b}: expected a value that checkpoints can store "),
    ],
)
def test_a_setting_that_no_reader_would_accept_is_refused_before_anything_starts(tmp_path, name, value, said):
    value = value.replace("{folder}", str(tmp_path)) if isinstance(value, str) else value
    config = changed(compose(words(tmp_path / "run")), {name: value})
    with pytest.raises(ConfigError, match=re.escape(said)):
        Session(config, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_no_reader_would_accept_is_refused_by_resume_too(folder, capsys):
    before = {p: (p / "manifest.json").read_bytes() for p in points(folder)}
    assert main(["resume", str(folder), "logger.project='a\tb'", "budget.env_steps=640"]) == 2
    assert capsys.readouterr().err.startswith("pql: logger.project=a b: expected a value that checkpoints can store ")
    assert {p: (p / "manifest.json").read_bytes() for p in points(folder)} == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "mine\u202e"}, r"spec is not without control characters: mine\u202e"),
        ({"action": Box(1, (float("nan"),), (1.0,))}, "spec is not without NaN"),
        ({"max_episode_steps": -1}, "spec.max_episode_steps is not null or a whole number from 1 on"),
    ],
)
def test_a_simulator_whose_description_no_reader_would_accept_is_refused(tmp_path, changes, said):
    env = Counter(16, "cpu")
    env.spec = dataclasses.replace(env.spec, **changes)
    with pytest.raises(ConfigError) as error:
        Session(compose(words(tmp_path / "run")), env=env, quiet=True)
    assert "expected a simulator whose description checkpoints can store" in str(error.value)
    assert said in str(error.value)
    assert list(tmp_path.iterdir()) == []


# -- policies -------------------------------------------------------------------------------------------------------


def damage(path):
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(data)


@pytest.mark.fault(12)
def test_a_damaged_policy_is_named_and_the_next_best_is_taken(folder):
    kept = folder / "checkpoints"
    newest, before = points(folder)[::-1]
    order = [kept / "last", newest, before, kept / "best"]
    for i, path in enumerate(order[:-1]):
        damage(path)
        with pytest.warns(PqlWarning) as told:
            assert open_stored(folder).path == order[i + 1]
        said = [str(w.message) for w in told]
        assert len(said) == i + 1
        assert all(
            f"checkpoint={bad}: expected an intact checkpoint" in text
            for bad, text in zip(order[: i + 1], said, strict=True)
        )
        assert said[-1].endswith(f"; taking {order[i + 1].name} instead")
        assert load_policy(order[i + 1])(torch.zeros(2, 3)).shape == (2, 1)
    damage(order[-1])
    with pytest.warns(PqlWarning), pytest.raises(CorruptCheckpointError, match="checkpoints/best"):
        open_stored(folder)
    with pytest.raises(CorruptCheckpointError, match="checkpoints/last: expected an intact"):
        open_stored(kept / "last")  # asked for by name: nothing else will do


@pytest.mark.fault(12)
def test_a_run_that_starts_from_old_weights_takes_the_point_before(folder, tmp_path):
    damage(points(folder)[-1])
    with pytest.warns(PqlWarning, match=f"; taking {points(folder)[0].name} instead"):
        Session(compose(words(tmp_path / "new", f"init_from={folder}")), quiet=True).closing.close()


FOREIGN = {"process": {"python": "/opt/python"}}


@pytest.mark.parametrize(
    ("task", "ranks", "resume", "evaluate"),
    [
        ({"live": True}, (1, 1), "pql.resume('my run', 'x=1', env=...)", "pql.load_policy('my run')"),
        (
            {"process": {"python": "/opt/python"}},
            (1, 1),
            "pql resume 'my run' x=1 --trust",
            "pql eval 'my run' --trust",
        ),
        (
            {},
            (4, 4),
            "torchrun --standalone --nproc-per-node 4 -m pql.cli.main resume 'my run' x=1",
            "pql eval 'my run'",
        ),
        ({}, (4, 2), "torchrun ... -m pql.cli.main resume 'my run' x=1", "pql eval 'my run'"),
    ],
)
def test_a_command_has_all_that_it_needs(monkeypatch, task, ranks, resume, evaluate):
    monkeypatch.setattr(rundir, "world", lambda: World(0, ranks[0], 0, ranks[1]))
    config = small_config(task=task)
    assert rundir.command("resume", "my run", config, ["x=1"]) == resume
    assert rundir.command("eval", "my run", config) == evaluate


def test_a_run_of_foreign_code_is_refused_with_the_command_that_continues_it(tmp_path):
    rundir.create_run_dir(tmp_path, small_config(task=FOREIGN), [])
    with pytest.raises(ConfigError, match=f"to continue this run: pql resume {tmp_path} --trust$"):
        rundir.check_new(tmp_path)
