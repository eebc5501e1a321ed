"""``pql push`` and ``pql pull`` against a hub on the loopback: only data, of one commit, checked before it is kept."""

import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import Hub, serving
from run_files import run, words

import pql
from pql.cli.main import main
from pql.engine import deadlines
from pql.errors import ConfigError
from pql.run.hub import repo as hub_repo
from pql.run.store import checkpoint

pytest.importorskip("huggingface_hub")
NAME = "me/walker"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "secret-place"
    run(*words(folder, "eval.final=true", "logger.project=mine"))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        monkeypatch.chdir(tmp_path)
        yield served


@pytest.fixture
def pushed(hub: Hub, trained: Path) -> Hub:
    hub_repo.push(trained, NAME)
    return hub


def test_a_policy_goes_to_the_hub_and_comes_back(hub, trained, tmp_path, capsys):
    assert main(["push", str(trained), NAME]) == 0
    commit = hub.name(NAME, 0)
    assert capsys.readouterr().out == f"pushed: pql pull {NAME} revision={commit}\n"
    assert hub.private == {NAME: True}
    assert set(hub.repos[NAME][0]) == {"README.md", "manifest.json", "tensors.safetensors"}
    assert main(["pull", NAME]) == 0
    said = capsys.readouterr().out.splitlines()
    folder = Path("policies/me--walker")
    assert said == [f"policy: {folder}", f"again: pql pull {NAME} revision={commit}", f"next: pql eval {folder}"]
    assert json.loads((folder / "hub.json").read_text()) == {"repo": NAME, "revision": commit}
    obs = torch.randn(8, pql.make_env("pendulum", num_envs=1).spec.obs["policy"].shape[0])
    assert torch.equal(pql.load_policy(folder)(obs), pql.load_policy(trained)(obs))
    ours, theirs = (pql.evaluate(path, episodes=2, num_envs=2, seed=1) for path in (trained, folder))
    assert ours["returns"] == theirs["returns"]
    assert main(["eval", str(folder), "episodes=1"]) == 0
    assert [p.parent for p in folder.rglob("*episodes.json")] == [folder / "evaluations"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["me--walker"]  # nothing else is left


def test_a_pulled_policy_is_exported_and_filmed(pushed, trained, tmp_path):
    folder = hub_repo.pull(NAME, tmp_path / "here").folder
    assert main(["export", str(folder), "formats=pt2"]) == 0
    assert (folder / "export" / "policy.pt2").exists()
    pytest.importorskip("imageio_ffmpeg")
    assert main(["play", str(folder), "steps=3"]) == 0
    assert [p.suffix for p in (folder / "videos").iterdir()] == [".mp4"]


def test_what_is_pushed_names_no_place_of_this_machine(pushed, trained):
    files = pushed.repos[NAME][0]
    for name, content in files.items():
        assert b"secret-place" not in content, name
        assert str(Path.home()).encode() not in content, name
    config = json.loads(files["manifest.json"])["config"]
    assert {"run_dir", "init_from", "logger"}.isdisjoint(config)


def test_the_card_has_task_algorithm_returns_and_commands(pushed, trained):
    text = pushed.repos[NAME][0]["README.md"].decode()
    head = yaml.safe_load(text.split("---")[1])
    summary = json.loads((trained / "summary.json").read_text())
    assert head["library_name"] == "pql"
    assert head["tags"] == ["reinforcement-learning", "pql", "pendulum", "pql"]
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(summary["return_mean"], abs=0.006)
    table = dict(re.findall(r"\| ([^|]+) \| ([^|]+) \|", text))
    assert (table["task"], table["algorithm"], table["env steps"]) == ("pendulum", "pql", "320")
    assert float(table["return, mean"].replace(",", "")) == pytest.approx(summary["return_mean"], rel=1e-5)
    (command,) = re.findall(r"^pql train .*", text, re.M)
    assert "task=pendulum" in command
    assert "run_dir" not in command
    assert "logger" not in command
    best = hub_repo.card(NAME, trained / "checkpoints" / "best", {**checkpoint.load(trained / "checkpoints/last")[1]})
    assert "| seed |" in best


def test_the_newest_commit_or_the_named_one_is_pulled_as_a_whole(pushed, tmp_path, capsys):
    first = pushed.name(NAME, 0)
    second = pushed.commit(NAME, {"README.md": b"newer"})
    pushed.asked.clear()
    assert hub_repo.pull(NAME, "new").commit == second
    got = [path for _, path in pushed.asked if "/resolve/" in path]
    assert got
    assert all(f"/resolve/{second}/" in path for path in got)  # not the branch, which may move meanwhile
    assert Path("new/README.md").read_text() == "newer"
    assert main(["pull", NAME, f"revision={first}", "out=old"]) == 0
    assert "newer" not in Path("old/README.md").read_text()
    assert main(["pull", NAME, f"revision={'0' * 40}", "out=none"]) == 2
    assert "RevisionNotFound" in capsys.readouterr().err
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.pkl": b"x"}, "expected only manifest.json, tensors.safetensors, README.md; it has model.pkl"),
        ({"code.py": b"x"}, "it has code.py, and nothing was downloaded"),
        ({"a/../../b": b"x"}, "it has a/../../b"),
        ({"README.md": b" " * (1 << 19)}, "expected at most 262,144 bytes in README.md, not 524288"),
        ({".gitattributes": b"x", "LICENSE": b"x"}, ""),
    ],
)
def test_a_repository_with_anything_else_is_refused_before_a_download(pushed, capsys, files, said):
    pushed.commit(NAME, files)
    pushed.asked.clear()
    assert main(["pull", NAME, "out=got"]) == (2 if said else 0)
    error = capsys.readouterr().err
    assert (said in error, error.count("\n")) == (True, 1 if said else 0)
    assert any("/resolve/" in path for _, path in pushed.asked) != bool(said)
    assert Path("got").exists() != bool(said)
    if not said:
        assert sorted(p.name for p in Path("got").iterdir()) == ["README.md", "checkpoints", "hub.json"]


def damaged(files: dict[str, bytes], how: str) -> dict[str, bytes]:
    manifest = json.loads(files["manifest.json"])
    if how == "tensors":
        return {"tensors.safetensors": files["tensors.safetensors"][:-1] + b"\x7f"}
    if how == "kind":
        manifest["kind"] = "resume"
    elif how == "config":
        manifest["config"]["seed"] = "${oc.env:HOME}"
    elif how == "no json":
        return {"manifest.json": b"[" * 100_000}
    manifest["manifest_sha256"] = checkpoint._manifest_hash(manifest)
    return {"manifest.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tensors", "does not match its hash"),
        ("kind", "repo=me/walker: expected a complete, intact checkpoint (kind is not policy)"),
        ("config", "interpolations"),
        ("no json", "nested"),
    ],
)
def test_a_checkpoint_that_no_run_wrote_is_not_kept(pushed, how, said):
    pushed.commit(NAME, damaged(pushed.repos[NAME][0], how))
    with pytest.raises(ConfigError) as caught:
        hub_repo.pull(NAME, "got")
    assert said in str(caught.value)
    assert list(Path.cwd().iterdir()) == []


def test_a_file_larger_than_stated_is_not_kept(pushed):
    pushed.commit(NAME, {"README.md": b" " * (1 << 19)})
    pushed.sizes["README.md"] = 10
    with pytest.raises(ConfigError, match=r"README\.md|size"):
        hub_repo.pull(NAME, "got")
    assert list(Path.cwd().iterdir()) == []


def test_a_policy_whose_settings_name_code_says_that_it_needs_trust(hub, trained, tmp_path, capsys):
    files = {p.name: p for p in (trained / "checkpoints" / "last").iterdir()}
    tensors, manifest = checkpoint.load(trained / "checkpoints" / "last")
    manifest["config"]["task"]["name"] = "evil:Env"
    checkpoint.save(tmp_path / "odd", tensors, {k: v for k, v in manifest.items() if not k.endswith("sha256")})
    hub_repo.push(tmp_path / "odd", NAME)
    shutil.rmtree(tmp_path / "odd")
    assert files
    assert main(["pull", NAME]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: pql eval policies/me--walker --trust"
    assert main(["eval", "policies/me--walker"]) == 2
    assert "task.name=evil:Env: expected something built in or registered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["pull", "walker"], "repo=walker: expected OWNER/NAME"),
        (["pull", "me/../walker"], "expected OWNER/NAME"),
        (["pull", NAME, "out=."], "out=.: expected a new folder"),
        (["pull", "me/other"], "repo=me/other: expected a repository that http://127.0.0.1"),
        (["pull", NAME, "rev=1"], "rev=1: expected one of out, revision"),
        (["push", "nowhere", NAME], "expected a run directory with a checkpoint"),
        (["push", "nowhere", NAME, "private=2"], "private=2: expected true or false"),
    ],
)
def test_a_mistake_is_one_line(hub, capsys, argv, said):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.fault(30)
def test_a_hub_that_says_nothing_is_given_up(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(deadlines, "HUB", 0.5)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        before = time.monotonic()
        assert main(["pull", "me/policy"]) == 2
    assert time.monotonic() - before < 20
    assert "repo=me/policy: expected a repository that " in capsys.readouterr().err.splitlines()[-1]


def test_without_the_extra_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setattr(hub_repo.importlib.util, "find_spec", lambda name: None)
    assert main(["pull", NAME]) == 2
    assert "pip install 'pql-rl[hub]'" in capsys.readouterr().err


def test_demonstrations_and_their_hash_stay_at_home():
    replay = {"demos": "/home/me/demos.h5", "demo_keys": {"policy": ["pose"]}, "demo_share": 0.5}
    kept = hub_repo.without_places({"config": {"replay": replay}, "sources": {"replay.demos": "a" * 64}})
    assert kept == {"config": {"replay": {"demo_share": 0.5}}}
