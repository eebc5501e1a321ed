"""Mistakes in a user's preset files are reported with the file."""

import pytest

from pql.config.compose import compose
from pql.config.layers import Presets
from pql.config.trust import names_foreign_code
from pql.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma: 0.9", r"^gamma=0.9: expected a known setting.*; it is in .*/tuned/pendulum/pql.yaml$"),
        (
            "algo.gamma: 0.9",
            r"^algo.gamma=0.9: expected nested settings in .*/tuned/pendulum/pql.yaml: algo: \{gamma: 0.9\}$",
        ),
        (
            "algo: {critic: {net.lr: 0.9}}",
            r"^net.lr=0.9: expected nested settings in .*/tuned/pendulum/pql.yaml: net: \{lr: 0.9\}$",
        ),
        ("algo: {gamma: 9}", r"^algo.gamma=9.0: expected a number .*; it is in .*/tuned/pendulum/pql.yaml$"),
        ("algo: {gama: 0.9}", r"^algo.gama=0.9: expected a known setting.*; it is in .*/tuned/pendulum/pql.yaml$"),
    ],
)
def test_an_unknown_setting_is_named_with_its_file(tmp_path, text, message):
    path = tmp_path / "tuned" / "pendulum" / "pql.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose([f"presets={tmp_path}", "task=pendulum", "algo=pql", "device=cpu"])


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("pqll", r"^.*/algo/mine.yaml: like=pqll: expected one of .*\(did you mean pql\?\)$"),
        ("mine", "is not like mine itself"),
    ],
)
def test_a_base_that_does_not_exist_is_named_with_its_file(tmp_path, base, message):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text(f"like: {base}\n")
    with pytest.raises(ConfigError, match=message):
        compose([f"presets={tmp_path}", "task=pendulum", "algo=mine", "device=cpu"])


def test_a_package_without_its_preset_is_named(tmp_path):
    presets = Presets()
    presets.plugins = {"soft": tmp_path / "soft.yaml"}
    with pytest.raises(
        ConfigError, match=r"^algo=soft: expected its preset .*soft.yaml, which the package has to install"
    ):
        presets.check("algo", "soft")


@pytest.mark.parametrize(("name", "code"), [("pendulum", False), ("points:Points", True)])
def test_a_run_of_unregistered_code_needs_trust(name, code):
    config = compose(["task=pendulum", f"task.name={name}", "device=cpu"])
    assert names_foreign_code(config) == code
