"""Structure of the package: allowed imports between subpackages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pql
from tools import structure

ROOT = Path(__file__).resolve().parents[2]
MODULES = structure.modules(ROOT)
HYDRA = {
    "config.compose",
    "cli.sweep_values",
    "envs.adapters.isaacgym",
}  # overrides; Isaac Gym Envs has its own configs


def test_no_import_goes_up():
    assert structure.upward(MODULES) == []
    assert len(structure.ALLOWED) <= 5
    for name, target in structure.ALLOWED:
        assert target in MODULES[name].imports  # an exception that nothing needs is none


def test_no_modules_import_one_another():
    assert structure.cycles(MODULES) == []


def test_every_module_is_in_a_room():
    assert {module.room for module in MODULES.values()} - {"", "__main__"} == set(structure.ROOMS)
    entries = [p for p in (ROOT / "pql").iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 21
    for module in MODULES.values():
        if module.path.name == "__init__.py" and module.name:
            assert len((module.tree.body[0].value.value).splitlines()) >= 1  # says what the room is for


def test_simulators_import_the_contract_alone():
    allowed = ("envs", "contract", "types", "errors", "")
    for module in MODULES.values():
        if module.room == "envs":
            assert [t for t in module.imports if t.partition(".")[0] not in allowed] == [], module.name


def test_the_command_line_alone_knows_hydra():
    found = {m.name for m in MODULES.values() if re.search(r"^\s*(from|import) hydra", m.path.read_text(), re.M)}
    assert found <= HYDRA


def test_actors_need_no_torch():
    names = ("pql.remote.protocol", "pql.remote.actor.client", "pql.remote.actor.command")
    code = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"


def test_the_public_names_are_listed_and_loaded_when_used():
    code = "import sys, pql; names = dir(pql); print('torch' in sys.modules, *names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    torch, *names = done.stdout.split()
    assert (torch, names) == ("False", sorted(pql.__all__))
    assert all(hasattr(pql, name) for name in names)


LONG_FILES: dict[str, str] = {}
"""Modules that may have more than 400 lines, with the reason."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that may have more than 60 lines, with the reason."""
MOST_LINES = {"pql": 49_210, "tests": 52_470, "tools": 6_961}
"""Lines of Python a folder may have. A commit that removes lines lowers its number, one that raises it says why."""


def test_files_and_functions_are_short():
    assert structure.long_files(MODULES).keys() == LONG_FILES.keys()
    assert structure.long_functions(MODULES).keys() == LONG_FUNCTIONS.keys()


def test_few_functions_take_more_than_six_parameters():
    assert sum(structure.parameters(node) > 6 for _, node in structure.functions(MODULES)) <= 15


def test_public_names_are_defined_once():
    assert len(structure.repeated_names(MODULES)) <= 1


def test_the_reading_path_is_short():
    assert structure.reading_path(ROOT) <= 1_100


def test_functions_of_tensors_name_shapes():
    assert structure.shapeless(MODULES) == []


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_code_does_not_grow(folder):
    assert structure.lines_of_code(ROOT, folder) <= MOST_LINES[folder]


def test_the_documentation_does_not_grow():
    assert structure.pages(ROOT) <= 50
