"""Presets: layered YAML files of settings.

From the weakest to the strongest: the schema's defaults; ``algo/NAME.yaml``; ``task/``; ``placement/``, ``logger/`` and
``atari/``; ``scale/``; ``tuned/SCALE/ALGO.yaml``; ``tuned/TASK/ALGO.yaml``; the command line. A file may extend another
of its group by ``like: NAME``. If an algorithm has no file below
``tuned/``, that of its base (``like``) is used, provided both have the same family. Likewise for tasks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pql.config.families import GROUP
from pql.config.files import expanded
from pql.contract.plugins import entry_points
from pql.contract.registry import env_names
from pql.errors import ConfigError, nearest

GROUPS = ("algo", "task", "atari", "placement", "logger", "scale")
WHOLE = ("atari", "scale")  # groups whose files may set anything; files of the others set only their group
LIKE, SCALES = "like", "scales"

MOVED = {
    "ppo_ant": "algo=ppo task=isaac_ant",
    "ppo_hand": "algo=ppo task=shadow_hand or allegro_hand",
    "ppo_franka": "algo=ppo task=franka_cube_stack",
}
"""Former presets of ``algo`` that are settings of tasks (``tuned/TASK/ppo.yaml``)."""

registered: dict[str, Mapping[str, Any]] = {}
"""Presets of algorithms registered in this process."""


class Layer(NamedTuple):
    """Settings of one file, as a tree, and their origin."""

    source: str
    tree: Any


class Presets:
    """The preset files of this library, of installed packages and of the user.

    Args:
        folders: of the user's, laid out as ``pql/config/presets``; they come first.
    """

    def __init__(self, folders: Sequence[str | Path] = ()):
        for folder in folders:
            if not expanded("presets", folder).is_dir():
                raise ConfigError("presets", folder, "a folder with presets: algo/NAME.yaml, tuned/TASK/ALGO.yaml, ...")
        self.folders = [*(expanded("presets", f) for f in folders), Path(__file__).with_name("presets")]

    @cached_property
    def plugins(self) -> dict[str, Path]:
        """The YAML files of installed packages' algorithms: ``NAME.yaml`` next to the module of NAME."""
        found = {}
        for entry in entry_points(group=GROUP):
            spec = find_spec(entry.module)
            if spec is not None and spec.origin is not None:
                found[entry.name] = Path(spec.origin).with_name(f"{entry.name}.yaml")
        return found

    def names(self, group: str) -> list[str]:
        """Return the names of the presets of a group."""
        found = {p.stem for folder in self.folders for p in (folder / group).glob("*.yaml")}
        more = {"algo": {*self.plugins, *registered}, "logger": {e.name for e in entry_points(group="pql.loggers")}}
        return sorted(found | more.get(group, set()))

    def check(self, group: str, name: str, hint: str = "") -> None:
        """Raise ``ConfigError`` for a preset that does not exist."""
        if group == "logger" and name in self.names("logger"):
            return
        if self._path(group, name) is None and not (group == "algo" and name in registered):
            if group == "algo" and name in self.plugins:
                missing = f"its preset {self.plugins[name]}, which the package has to install with the module"
                raise ConfigError(group, name, missing)
            if group == "algo" and name in MOVED:
                raise ConfigError(group, name, f"{MOVED[name]}, whose settings for scale=gpu these are")
            names = self.names(group)
            if group == "task" and (":" in name or name in env_names()):
                hint = f" (did you mean task=env task.name={name}?)"
            raise ConfigError(group, name, f"one of {', '.join(names)}{hint or nearest(name, names)}")

    def about(self, group: str, name: str) -> str:
        """Return a preset's description: the comment at the beginning of its file."""
        path = self._path(group, name)
        lines = path.read_text().splitlines() if path else []
        return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""

    def layers(self, chosen: Mapping[str, str]) -> Iterator[Layer]:
        """Return the files of the chosen presets, weakest first.

        Args:
            chosen: preset by group.
        Raises:
            ConfigError: no such preset, a file that cannot be read, or an algorithm without settings for the scale.
        """
        for group in (g for g in GROUPS if g in chosen):
            for name in reversed(self.line(group, chosen[group])):
                tree = {k: v for k, v in self._read(group, name).items() if k not in (LIKE, SCALES)}
                if group == "algo":
                    tree = {"name": Path(chosen["algo"]).stem, **tree}
                yield Layer(self.shown(f"{group}/{name}.yaml"), tree if group in WHOLE else {group: tree})
        algo, scale = chosen["algo"], chosen["scale"]
        tuned = [*self.tuned([scale], algo, scale)]
        if not tuned:
            there = [s for s in self.names("scale") if [*self.tuned([s], algo, s)]]
            if not there:
                allowed = f"settings for it: {SCALES}.{scale} in the preset algo={algo}, such as {{like: pql}}"
                raise ConfigError("scale", scale, allowed)
            raise ConfigError("scale", scale, f"one of {', '.join(there)}: algo={algo} has no settings for another")
        yield from tuned
        yield from self.tuned(self.line("task", chosen["task"]), algo, scale)

    def shown(self, file: str) -> str:
        """Return a preset's file for messages: below ``cfg`` (this library's, as in a checkout) or the user's."""
        folder = next((folder for folder in self.folders if (folder / file).exists()), None)
        return file if folder is None else f"cfg/{file}" if folder == self.folders[-1] else str(folder / file)

    def line(self, group: str, name: str) -> list[str]:
        """Return a preset and its bases (``like``), direct and indirect."""
        self.check(group, name)
        found = [name]
        while (base := self._read(group, found[-1]).get(LIKE)) is not None:
            setting = f"{self.shown(f'{group}/{found[-1]}.yaml')}: {LIKE}"
            if base in found:
                raise ConfigError(setting, base, f"a preset that is not like {name} itself")
            try:
                self.check(group, base)
            except ConfigError as error:
                raise ConfigError(setting, base, error.allowed) from error
            found.append(base)
        return found

    def family(self, algo: str) -> str:
        """Return the family of an algorithm's preset."""
        return str(self.setting("algo", algo, "family") or "ddpg")

    def setting(self, group: str, name: str, key: str) -> Any:
        """Return the value of ``key`` in a preset or its nearest base that sets it, else None."""
        return next((tree[key] for one in self.line(group, name) if key in (tree := self._read(group, one))), None)

    def tuned(self, places: Sequence[str], algo: str, scale: str) -> Iterator[Layer]:
        """The settings of an algorithm at a scale or on a task, weakest first; of several ``places`` the first's.

        Args:
            scale: whose part of a task's file, below ``scales``, comes after the rest of it.
        """
        family = self.family(algo)
        for name in (n for n in self.line("algo", algo) if self.family(n) == family):
            for place in places:
                if (found := self._tuned_tree(place, name)) is not None:
                    yield from self._extended(place, name, found, scale)
                    return

    def _extended(self, place: str, algo: str, tree: Mapping[str, Any], scale: str) -> Iterator[Layer]:
        if (base := tree.get(LIKE)) is not None:
            there, _, name = base.rpartition("/")
            found = self._tuned_tree(there or place, name)
            if found is None:
                setting = f"{self.shown(f'tuned/{place}/{algo}.yaml')}: {LIKE}"
                raise ConfigError(setting, base, "ALGO, or PLACE/ALGO, with such a file")
            yield from self._extended(there or place, name, found, scale)
        own = f"tuned/{place}/{algo}.yaml"
        own_file = any((folder / own).exists() for folder in self.folders)
        file = self.shown(own) if own_file else f"{self.shown(f'algo/{algo}.yaml')}: {SCALES}.{place}"
        yield Layer(file, {k: v for k, v in tree.items() if k not in (LIKE, SCALES)})
        if (sized := (tree.get(SCALES) or {}).get(scale)) is not None:
            yield Layer(f"{file}: {SCALES}.{scale}", sized)

    def _tuned_tree(self, place: str, algo: str) -> Mapping[str, Any] | None:
        for folder in self.folders:
            if (path := folder / "tuned" / place / f"{algo}.yaml").exists():
                return read_preset(path)
        scales = self._read("algo", algo).get(SCALES) or {}
        return scales.get(place)

    def _path(self, group: str, name: str) -> Path | None:
        if name.endswith(".yaml"):
            path = expanded(group, name)
            return path if path.exists() else None
        found = [p for folder in self.folders if (p := folder / group / f"{name}.yaml").exists()]
        if not found and group == "algo":
            found = [p for n, p in self.plugins.items() if n == name and p.exists()]
        return found[0] if found else None

    def _read(self, group: str, name: str) -> Mapping[str, Any]:
        path = self._path(group, name)
        if path is None and group == "logger":  # of an installed package, which has no file
            return {"kind": name}
        return registered[name] if path is None else read_preset(path)


def read_preset(path: Path) -> Mapping[str, Any]:
    """Read the settings of a YAML file.

    Raises:
        ConfigError: it is none.
    """
    try:
        tree = _parsed(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError("presets", path, f"a YAML file of settings ({error})") from error
    if not isinstance(tree, dict):
        raise ConfigError("presets", path, "a YAML file of settings")
    return {str(k): v for k, v in tree.items()}


@cache
def _parsed(text: str) -> Any:
    """Raises ``ValueError`` for invalid YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(str(error)) from error
