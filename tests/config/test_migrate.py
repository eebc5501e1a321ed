"""Every name in the tables of docs/migrate exists: in pql's schema, or in the other libraries if installed."""

import inspect
import re
from pathlib import Path

import pytest

from pql.cli.completion import choices_of
from pql.config.compose import known_settings
from pql.config.layers import GROUPS, Presets

PAGES = Path(__file__).parents[2] / "docs/migrate"
LIBRARIES = {
    "rsl_rl": ("rsl_rl", "Settings"),
    "Stable-Baselines3": ("sb3", "Settings"),
    "skrl": ("rl_games_skrl", "Settings of skrl"),
    "rl_games": ("rl_games_skrl", "Settings of rl_games"),
    "FastTD3": ("fasttd3_flashsac", "Settings of FastTD3"),
    "FlashSAC": ("fasttd3_flashsac", "Settings of FlashSAC"),
    "PQL": ("README", "Settings of the PQL reference code"),
}
"""Library -> page and section of its table."""
KNOWN = known_settings()


def tables():
    """Return library -> rows of [its name, pql's name, notes], markup included."""
    found = {}
    for library, (page, title) in LIBRARIES.items():
        parts = re.split(r"^## (.*)$", (PAGES / f"{page}.md").read_text(), flags=re.M)
        body = dict(zip(parts[1::2], parts[2::2], strict=True))[title]
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
        found[library] = rows[2:]
    return found


def quoted(cell):
    return re.findall(r"`([^`]*)`", cell)


def test_every_page_has_its_tables_of_three_columns_and_is_listed():
    found, index = tables(), (PAGES / "README.md").read_text()
    for page in PAGES.glob("*.md"):
        assert page.stem == "README" or page.stem in {page for page, _ in LIBRARIES.values()}
        assert page.stem == "README" or f"({page.name})" in index
    for title, rows in found.items():
        assert len(rows) > 20, title
        assert {len(row) for row in rows} == {3}, title
        assert all(quoted(row[0]) for row in rows), title


def ours():
    """(where, word) of every name of ours: the middle column, and dotted words anywhere else."""
    for title, rows in tables().items():
        for _, here, notes in rows:
            yield from ((title, word) for word in quoted(here))
            yield from ((title, word) for word in quoted(notes) if re.match(r"(algo|budget|replay|task|eval)\.", word))
    intro = (PAGES / "README.md").read_text()
    yield from (("intro", word) for word in quoted(intro) if re.match(r"(algo|budget|replay|task|eval)\.", word))


def test_every_name_on_our_side_is_in_the_schema():
    words = list(ours())
    assert len(words) > 150
    for where, word in words:
        name, equals, value = word.partition("=")
        if equals and name in GROUPS:
            assert value in Presets().names(name), (where, word)
        else:
            assert name in KNOWN or name.startswith("task.kwargs."), (where, word)


def test_choices_named_in_the_notes_are_allowed():
    """Rows whose notes quote plain words for a setting with choices: at least one of the words is a choice of it."""
    checked = 0
    for rows in tables().values():
        for _, here, notes in rows:
            for name in quoted(here):
                words = [w for w in quoted(notes) if re.fullmatch(r"[a-z]+", w)]
                if choices_of(name) and words:
                    assert set(words) & set(choices_of(name)), (name, words)
                    checked += 1
    assert checked >= 5


def parameters(*callables):
    return {name for c in callables for name in inspect.signature(c).parameters}


def test_rsl_rls_names_are_its_own():
    pytest.importorskip("rsl_rl")
    from rsl_rl.algorithms import PPO, Distillation
    from rsl_rl.models import MLPModel, RNNModel
    from rsl_rl.modules.distribution import GaussianDistribution
    from rsl_rl.runners import OnPolicyRunner

    known = parameters(PPO, MLPModel, RNNModel, GaussianDistribution, OnPolicyRunner.learn)
    known |= {one.__name__ for one in (OnPolicyRunner, PPO, Distillation)}
    source = inspect.getsource(inspect.getmodule(OnPolicyRunner)) + inspect.getsource(inspect.getmodule(PPO))
    source += inspect.getsource(__import__("rsl_rl.utils.logger", fromlist=["Logger"]))
    for theirs, *_ in tables()["rsl_rl"]:
        for name in quoted(re.sub(r"\(.*\)", "", theirs)):  # in brackets: names of older versions
            if name != "max_iterations":  # of the scripts that start it
                assert name in known or f'"{name}"' in source, name


def test_stable_baselines_names_are_its_own():
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.vec_env import VecNormalize
    from stable_baselines3.td3.policies import TD3Policy

    algorithms = {name: getattr(sb3, name) for name in ("PPO", "A2C", "SAC", "TD3", "DDPG", "DQN")}
    others = (ActorCriticPolicy, TD3Policy, VecNormalize, EvalCallback, make_vec_env, sb3.PPO.learn)
    known = parameters(*algorithms.values(), *others) | algorithms.keys()
    for theirs, *_ in tables()["Stable-Baselines3"]:
        for name in quoted(theirs):
            assert name in known, name
            for of in re.findall(r"\b(PPO|A2C|SAC|TD3|DQN)\b", theirs.replace(f"`{name}`", "")):
                assert name in parameters(algorithms[of]) or name in algorithms, (name, of)


def test_rl_games_names_are_its_own():
    """It reads its settings by string from dictionaries, so its source is searched."""
    rl_games = pytest.importorskip("rl_games")
    folder = Path(rl_games.__path__[0])
    source = "".join(path.read_text() for name in ("algos_torch", "common") for path in folder.glob(f"{name}/*.py"))
    source += (folder / "torch_runner.py").read_text()
    for theirs, *_ in tables()["rl_games"]:
        for name in quoted(theirs):
            assert f"'{name}'" in source or f'"{name}"' in source, name


def test_skrls_names_are_its_own():
    pytest.importorskip("skrl")
    from dataclasses import fields

    from skrl.agents.torch import a2c, ddpg, ppo, sac, td3

    configs = a2c.A2C_CFG, ddpg.DDPG_CFG, ppo.PPO_CFG, sac.SAC_CFG, td3.TD3_CFG
    known = {field.name for config in configs for field in fields(config)} | {config.__name__ for config in configs}
    elsewhere = {"timesteps", "memory_size"}  # of the trainer and of the memory
    for theirs, *_ in tables()["skrl"]:
        for name in quoted(re.sub(r"\(.*\)", "", theirs)):
            assert name in known | elsewhere or name.startswith("experiment."), name
