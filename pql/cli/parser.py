"""Parser of the command line: every command with its words, its own settings and its help."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pql import __version__
from pql.cli import commands
from pql.errors import ConfigError
from pql.remote.actor import command as actor_command
from pql.remote.fleet import command as fleet_command

Word = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of ``add_argument``."""


class Command(NamedTuple):
    """A command. ``commands`` has the function that carries it out, ``run_NAME``.

    Attributes:
        about: help and, after a colon, an example.
        words: positional words and options.
        own: names and types of the key=value settings that are not settings of a run.
    """

    about: str
    words: Sequence[Word] = ()
    own: Mapping[str, type] = {}

    @property
    def options(self) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(name for names, _ in self.words for name in names if name.startswith("-"))

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the options without a value, which may stand anywhere."""
        return tuple(name for names, more in self.words if "action" in more for name in names)


def word(*names: str, **more: Any) -> Word:
    return names, more


def overrides(about: str | None = None) -> Word:
    return word("overrides", nargs="*", help=about)


def flag(*names: str, about: str) -> Word:
    return word(*names, action="store_true", help=about)


def _runs(about: str) -> Word:
    return word("words", metavar="RUN", nargs="+", help=about)


TRUST = flag("--trust", about="run the code, programs and paths that the file names (docs/security.md)")
LOUD = flag("--verbose", about="show what simulators print")
CHECKPOINT, EXPORT = (word("path", metavar=f"RUN|CHECKPOINT{more}") for more in ("", "|EXPORT"))
REPO = word("repo", metavar="OWNER/NAME")
EPISODES = {"num_envs": int, "episodes": int, "seed": int, "device": str, "epsilon": float, "max_steps": int}
EPISODES |= {"play": bool, "out": str}
PAGE = {"x": str, "out": str, "thresholds": list, "at": list, "references": str}
COMMANDS = {
    "train": Command(
        "train: pql train task=halfcheetah algo=pql seed=1",
        (
            overrides("key=value settings; presets: algo= task= atari= placement= logger= scale="),
            flag("-m", "--multirun", about="a run for every combination: pql train -m algo=pql,sac seed=1,2,3"),
            flag("--cfg", about="print every setting and where its value comes from; also: --cfg job"),
            flag("--dry-run", about="build, do two ticks, print memory and the time it takes"),
            word("--presets", metavar="DIR", help="a folder of your own presets: algo/NAME.yaml, ..."),
            LOUD,
            flag("-h", "--help", about="with algo=NAME: the settings that NAME reads"),
        ),
    ),
    "resume": Command(
        "continue a run: pql resume RUN budget.seconds=600", (word("run_dir", metavar="RUN"), overrides(), TRUST, LOUD)
    ),
    "eval": Command(
        "evaluate a policy: pql eval RUN|CHECKPOINT episodes=100",
        (
            EXPORT,
            overrides("num_envs=16 episodes=16 seed=0 device=cpu epsilon=0 max_steps=N play=false out=FILE"),
            TRUST,
        ),
        EPISODES,
    ),
    "play": Command(
        "a video of a policy: pql play RUN|CHECKPOINT episodes=1",
        (
            EXPORT,
            overrides("out=FILE.mp4 episodes=1 steps=N width=N height=N seed=0 device=cpu"),
            flag("--live", about="the simulator's own window instead of a video (MuJoCo)"),
            flag("--browser", about="a live page on this machine instead of a video"),
            TRUST,
            LOUD,
        ),
        {**dict.fromkeys(("episodes", "steps", "width", "height", "seed", "port"), int), "device": str, "out": str},
    ),
    "record": Command(
        "demonstrations of a policy: pql record RUN|CHECKPOINT out=demos.safetensors",
        (
            EXPORT,
            overrides(
                "out=FILE.safetensors episodes=16 steps=N num_envs=16 min_return=X success_only=false noise=0 epsilon=0"
                " seed=0 device=cpu max_steps=N play=false"
            ),
            TRUST,
        ),
        EPISODES | {"steps": int, "min_return": float, "success_only": bool, "noise": float},
    ),
    "export": Command(
        "a policy as .pt2 and .onnx files: pql export RUN|CHECKPOINT formats=onnx",
        (CHECKPOINT, overrides("out=FOLDER formats=pt2,onnx scale=true"), TRUST),
        {"formats": str, "scale": bool, "out": str},
    ),
    "compare": Command(
        "compare runs on one page: pql compare RUN... x=env_steps out=DIR",
        (_runs("runs, or folders of runs; x= out= thresholds=[...] at=[...] references="),),
        PAGE,
    ),
    "report": Command(
        "a page about one run: pql report RUN out=DIR", (_runs("a run; x= out= thresholds=[...] at=[...]"),), PAGE
    ),
    "watch": Command(
        "TensorBoard on runs while they train: pql watch RUN|FOLDER port=8421",
        (word("path", metavar="RUN|FOLDER"), overrides("port=8421 open=true (in a browser)")),
        {"port": int, "open": bool},
    ),
    "pull": Command(
        "a policy from a model hub: pql pull OWNER/NAME revision=COMMIT",
        (REPO, overrides("revision=COMMIT out=FOLDER")),
        {"out": str, "revision": str},
    ),
    "push": Command(
        "a policy to a model hub: pql push RUN OWNER/NAME private=false",
        (CHECKPOINT, REPO, overrides("private=true message=TEXT")),
        {"private": bool, "message": str},
    ),
    "sweep": Command(
        "search settings: pql sweep 'algo.critic.lr=interval(1e-4,1e-2)' trials=20",
        (
            overrides("as for train; trials= seeds= sampler= objective= prune= pruner= sweep_dir="),
            flag("--pbt", about="population based training: population=4 every=50_000 instead of trials="),
        ),
    ),
    "warm-up": Command(
        "compile ahead what a run needs: pql warm-up task=ant num_envs=4096", (overrides("as for train"),)
    ),
    "profile": Command(
        "where a run's tick goes: pql profile task=ant num_envs=4096",
        (
            overrides("as for train"),
            word("--out", metavar="FILE", default="trace.json.gz", help="the trace; default: trace.json.gz"),
            word("--ticks", type=int, default=5, help="default: 5"),
        ),
    ),
    "actor": Command("environments for a learner elsewhere: pql actor --connect HOST:PORT --task ant"),
    "fleet": Command("actors on a Ray cluster: pql fleet --connect HOST:PORT --task ant --actors 16"),
    "list": Command("what there is: pql list tasks|algos|games", (word("what", choices=("tasks", "algos", "games")),)),
    "doctor": Command(
        "check this machine, or a simulator: pql doctor --env NAME",
        (
            word("--env", metavar="NAME"),
            word("--num-envs", type=int, help="default: 16; 64 with --symmetry"),
            word(
                "--steps",
                type=int,
                help="default: a little over the time limit, so that episodes end; 200 with --symmetry",
            ),
            flag("--symmetry", about="compare the task's steps with their reflections: pql doctor --symmetry task=ant"),
            LOUD,
            overrides(
                "task=NAME or --env NAME; device=, task.*= as in training; key=value: keywords of the environment"
            ),
        ),
    ),
    "completion": Command(
        'for the shell: eval "$(pql completion bash)"',
        (
            word("shell", nargs="?", choices=("bash", "zsh", "fish")),
            word("--words", metavar="LINE", help="what the line's last word may become"),
        ),
    ),
}


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, like every other error, instead of in argparse's format.

    ``flags`` may be anywhere: argparse would end a list of settings at the first one.
    """

    flags: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(sorted(args or (), key=lambda word: word not in self.flags), namespace)

    def error(self, message: str) -> NoReturn:
        hint = "; settings have no dashes: seed=3" if "unrecognized arguments: --" in message else ""
        raise ConfigError("command", self.prog, f"other words: {message} ({self.prog} --help){hint}")


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="pql", description="Parallel Q-Learning on massively parallel simulators.")
    top.add_argument("--version", action="version", version=f"pql {__version__}")
    sub = top.add_subparsers(required=True, metavar="|".join(COMMANDS), parser_class=Parser)
    for name, command in COMMANDS.items():
        one: Parser = sub.add_parser(name, help=command.about, add_help="--help" not in command.options)
        one.flags = command.flags
        for names, more in command.words:
            one.add_argument(*names, **more)
        run = getattr(commands, f"run_{name.replace('-', '_')}", None)  # actors and fleets set their own below
        one.set_defaults(run=run, own=command.own, parser=one, commands=COMMANDS)
    actor_command.add_actor_options(sub.choices["actor"])
    fleet_command.add_fleet_options(sub.choices["fleet"])
    return top


def presets_as_setting(words: Sequence[str]) -> list[str]:
    """Rewrite ``--presets DIR``, which may be anywhere among the settings, as ``presets=DIR``.

    Hydra's ``--cfg job`` is ``--cfg``.
    """
    name = "--presets"
    out: list[str] = []
    for word in words:
        if out and out[-1] == name:
            out[-1] = f"presets={word}"
        elif word == "job" and out[-1:] == ["--cfg"]:
            pass
        else:
            out.append(word.removeprefix("--") if word.startswith(f"{name}=") else word)
    return out
