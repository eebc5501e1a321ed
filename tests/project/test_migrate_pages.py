"""The scripts of docs/migrate run: before, where the other library is installed, and after, with the same sizes.

skrl and rl_games are installed by ``make peers``, with a Python of their own (``.peers/bin/python``). Budgets are
shortened by replacing text of the scripts. FastTD3 and FlashSAC are programs of repositories, not packages: their
commands are not run, and their options are looked up in the page's table.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_migrate import quoted, tables

import pql
from pql.config import leaves
from pql.config.compose import compose

PAGES = Path(__file__).parents[2] / "docs/migrate"
SHORTER = {
    "rsl_rl": {"num_envs=64": "num_envs=4", '"num_envs": 64': '"num_envs": 4', "iterations=100": "iterations=2"}
    | {"100 * 32 * 64": "2 * 32 * 4"},
    "sb3": {"_timesteps=50_000": "_timesteps=400", "=1_600": "=160", "=200_000": "=4_000"}
    | {'": 50_000': '": 400', '": 100,': '": 10,', '": 200_000': '": 4_000'},
    "rl_games_skrl": {'"timesteps": 3_200': '"timesteps": 64', '"max_epochs": 100': '"max_epochs": 2'}
    | {"3_200 * 16": "64 * 16"},
}
NEEDS = {"rsl_rl": ("rsl_rl", "mujoco"), "sb3": ("stable_baselines3",)}
PEERS = PAGES.parents[1] / ".peers/bin/python"
QUICK = ["device=cpu", "eval.num_envs=2", "eval.every_seconds=null"]


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.S)


def scripts(page):
    """(before, after), shortened; of rl_games and skrl (before with skrl, before with rl_games, after)."""
    texts = blocks(page)[: 3 if page == "rl_games_skrl" else 2]
    for long, short in SHORTER[page].items():
        assert sum(text.count(long) for text in texts) == 1, long
        texts = [text.replace(long, short) for text in texts]
    return texts


def run_script(text):
    scope = {}
    exec(compile(text, "script", "exec"), scope)
    return scope


def layers(named):
    """Shapes of the weight matrices among (name, tensor) pairs."""
    return sorted(tuple(value.shape) for _, value in named if value.dim() == 2)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", NEEDS)
def test_the_script_before_runs(page):
    before, _ = scripts(page)
    compile(before, page, "exec")
    for package in NEEDS[page]:
        pytest.importorskip(package)
    scope = run_script(before)
    if page == "rsl_rl":
        assert scope["runner"].logger.tot_timesteps == 2 * 32 * 4
        assert layers(scope["runner"].alg.actor.named_parameters()) == [(6, 64), (64, 17), (64, 64)]
    else:
        assert scope["model"].num_timesteps == 400
        assert scope["model"]._n_updates == 4 * (400 // 16 - 160 // 16)
        assert layers(scope["model"].actor.named_parameters()) == [(1, 128), (1, 128), (128, 3), (128, 128)]


SHAPES = "; print(sorted(tuple(v.shape) for _, v in {} if v.dim() == 2), file=open('shapes', 'w'))"
SAVED = "import glob, torch; ({},) = map(torch.load, glob.glob('runs/*/nn/*.pth'))"
"""rl_games keeps its agent to itself: the weights are in its checkpoint."""
ENDS = {
    "skrl": SHAPES.format("runner.agent.policy.named_parameters()").removeprefix("; "),
    "rl_games": SAVED.format("saved") + SHAPES.format("saved['model'].items()"),
}


@pytest.mark.parametrize(("library", "index"), [("skrl", 0), ("rl_games", 1)])
def test_the_script_before_runs_in_the_python_of_the_peers(library, index):
    code = scripts("rl_games_skrl")[index]
    compile(code, library, "exec")
    python = next((str(p) for p in (PEERS, Path(sys.executable)) if p.exists() and has(p, library)), None)
    if python is None:
        pytest.skip(f"needs {library}: make peers")
    subprocess.run([python, "-c", f"{code}\n{ENDS[library]}"], check=True, timeout=250)
    networks = [(1, 64), (64, 3), (64, 64)]  # of the policy; rl_games' model has the critic's, too
    assert Path("shapes").read_text().strip() == str(networks if library == "skrl" else sorted(2 * networks))


def has(python, module):
    """Return True if a Python has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("page", SHORTER)
def test_the_script_after_makes_the_same_run(page, monkeypatch):
    pytest.importorskip("mujoco" if page == "rsl_rl" else "gymnasium")
    *_, after = scripts(page)
    train = pql.train
    monkeypatch.setattr(pql, "train", lambda *words: train(*words, *QUICK, quiet=True))
    scope = run_script(after)
    run, shapes = scope["run"], layers(scope["policy"].net.named_parameters())
    if page == "rsl_rl":
        assert run.env_steps == 2 * 32 * 4 + 16 * 4  # with the warm-up, which fills the observation statistics
        assert {(64, 17), (64, 64), (6, 64)} <= set(shapes)
    elif page == "sb3":
        assert run.env_steps == 400
        assert run.updates_v == run.updates_p == 4 * (400 // 16 - 160 // 16)
        assert {(128, 3), (128, 128)} <= set(shapes)
    else:
        assert run.env_steps == 64 * 16 + 16 * 16
        assert {(64, 3), (64, 64), (1, 64)} <= set(shapes)


def test_an_environment_of_rsl_rl_becomes_a_simulator():
    """Its ends arrive, with final observations, which pql's own wrapper returns beside rsl_rl's interface."""
    pytest.importorskip("rsl_rl")
    code = blocks("rsl_rl")[2]
    for long, short in {'"halfcheetah", num_envs=16': '"pendulum", num_envs=4', "steps=1100": "steps=410"}.items():
        assert code.count(long) == 1
        code = code.replace(long, short)
    env = run_script(code + "report = pql.check_env(env, steps=410)")
    assert env["report"].ok
    env["env"].reset()
    steps = [env["env"].step(torch.zeros(4, 1)) for _ in range(400)]
    assert [t for t, step in enumerate(steps) if step.truncated.any()] == [199, 399]  # pendulum's time limit
    assert not any(step.terminated.any() for step in steps)
    assert steps[199].final_ok.tolist() == steps[199].truncated.tolist() == [True] * 4


def commands(text):
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize(("library", "first"), [("FastTD3", 0), ("FlashSAC", 2)])
def test_a_command_after_sets_what_the_command_before_set(library, first):
    """``test_commands_run`` runs the command."""
    texts = blocks("fasttd3_flashsac", "sh")
    (before,), (after,) = commands(texts[first]), commands(texts[first + 1])
    if library == "FastTD3":
        theirs = {k.removeprefix("--"): v for k, v in zip(before[2::2], before[3::2], strict=True)}
    else:
        theirs = dict(word.split("=", 1) for word in before if "=" in word)
    here = {
        quoted(row[0])[i]: (quoted(row[1]), i, row[2]) for row in tables()[library] for i in range(len(quoted(row[0])))
    }
    assert after[:2] == ["pql", "train"]
    found, checked = dict(leaves(compose([*after[2:], "device=cpu"]))), 0
    for name, value in theirs.items():
        if name in ("env", "env.env_name", "env_name"):
            continue
        ours, index, note = here[name]
        if not note or note.startswith(("transitions", "in both")):
            assert float(found[ours[index if len(ours) > 1 else 0]]) == float(value), name
            checked += 1
    assert checked >= 3
