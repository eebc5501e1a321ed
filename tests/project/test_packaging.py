"""The package's name on the index, and the location of its modules."""

import re
import subprocess
import tomllib
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pql

ROOT = Path(__file__).parents[2]
# The name "pql" on the package index belongs to another project: an instruction to install it runs that project's code.
OTHER_PROJECT = re.compile(
    r"pip3? install(?: -\S+)* ['\"]?pql(?![-\w])|['\"]pql\\?\[|\bpql(?:==|>=|~=)"
    r"|(?:distribution|requires|version)\([\"']pql[\"']\)"
)


def test_no_file_installs_the_other_project_of_the_name():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in set(listed.splitlines()) - {"tests/project/test_packaging.py"}:
        if name.endswith((".py", ".md", ".toml", ".txt", ".yaml", ".yml", "Makefile")):
            lines = (ROOT / name).read_text().splitlines()
            found += [f"{name}:{i}: {line}" for i, line in enumerate(lines, 1) if OTHER_PROJECT.search(line)]
    assert found == []
    assert OTHER_PROJECT.search("pip install 'pql" + "[mujoco]'")
    assert OTHER_PROJECT.search("pip install --no-deps pql" + " && pip install numpy")
    assert not OTHER_PROJECT.search("pip install 'pql-rl[mujoco]'")


def test_the_distribution_is_pql_rl_and_the_import_is_pql():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "pql-rl"
    assert project["scripts"] == {"pql": "pql.__main__:main"}
    assert metadata.version("pql-rl") == pql.__version__


def test_static_tools_find_every_module_below_one_folder():
    """An import hook would hide the modules of an editable install from type checkers and editors."""
    spec = PathFinder.find_spec("pql")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    assert (folder / "py.typed").exists()
    for name in ("envs", "engine", "envs/mujoco/isaac"):
        assert (folder / name / "__init__.py").exists()
