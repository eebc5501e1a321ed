"""The worked examples of docs/contributing.md work as described; docs/layout.md names what there is."""

import re
from pathlib import Path

import pytest

from pql.config import from_dict
from pql.config.compose import compose
from pql.config.fields import settings
from pql.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "contributing.md").read_text()
LAYOUT = (ROOT / "docs" / "layout.md").read_text()


def blocks(language):
    """The page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


@pytest.fixture
def presets(tmp_path):
    """A folder with the page's YAML files, each where its first line says."""
    for block in blocks("yaml"):
        path = tmp_path / re.match(r"# (\S+\.yaml)", block)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    return tmp_path / "presets"


def test_a_variation_of_an_algorithm_is_a_file(presets):
    algo = compose([f"presets={presets}", "algo=cautious", "device=cpu"]).algo
    assert (algo.name, algo.family, algo.gamma, algo.critic.layer_norm) == ("cautious", "ddpg", 0.9, True)
    assert algo.batch_size == compose(["algo=pql", "device=cpu"]).algo.batch_size


def test_a_task_is_a_file(presets):
    config = compose([f"presets={presets}", "task=short_pendulum", "device=cpu"])
    assert (config.task.name, config.task.kwargs) == ("pendulum", {"max_episode_steps": 50})


def test_a_setting_is_a_line():
    (code,) = (block for block in blocks("python") if "class NoisyConfig" in block)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "contributing.md", "exec"), names)
    (one,) = (one for one in settings(names["NoisyConfig"](), "algo.") if one.name == "algo.target_noise")
    assert (one.value, str(one.declaration.range)) == (0.2, "from 0 up to 10")
    config = compose(["device=cpu"])
    names["NoisyConfig"](smoothing=0.3).check(config)
    with pytest.raises(ConfigError, match=r"^algo.target_noise=0.2: expected at most algo.smoothing=0.1$"):
        names["NoisyConfig"](smoothing=0.1).check(config)
    assert "target_noise" not in from_dict({}).algo.__dataclass_fields__


def test_the_packages_are_those_of_the_table():
    packages = re.findall(r"`(\w+)/`", re.search(r"^\| package .*?\n\n", LAYOUT, re.M | re.S)[0])
    found = {p.name for p in (ROOT / "pql").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert {*packages} - {"log", "store", "export", "hub"} == found


def test_every_file_that_is_named_exists():
    named = {w for w in re.findall(r"`((?:pql|tests|tools|docs)/[\w/.]+)`", TEXT) if "NAME" not in w}
    assert len(named) >= 10
    assert [w for w in named if not (ROOT / w).exists()] == []


def test_the_page_of_the_layout_names_files_and_functions_that_exist():
    named = {word for word in re.findall(r"`([a-z][\w/]*(?:/[\w.]+|/))`", LAYOUT) if word.split("/")[0] != "tests"}
    inner = ("log/", "store/", "export/", "hub/", "pql/")
    assert len(named) > 40
    places = [ROOT, ROOT / "pql"]
    assert [w for w in named if w not in inner and not any((place / w).exists() for place in places)] == []
    calls = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`(?:, `([\w.]+)`)?", LAYOUT)
    assert len(calls) >= 10
    for file, *functions in calls:
        text = (ROOT / "pql" / file).read_text()
        for name in (part for function in functions for part in function.split(".") if part):
            assert re.search(rf"^ *(def|class) {name}\b", text, re.M), (file, name)
