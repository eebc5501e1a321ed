"""Shell completion: ``eval "$(pql completion bash)"``. The shell script calls ``pql completion --words`` at every Tab.

Completions are therefore those of this installation: commands, presets, settings and their values. A call takes a tenth
of a second, so nothing here may import torch or Hydra.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from pql.cli.sweep_plan import AXES, OBJECTIVES, PRUNERS, SAMPLERS, Settings
from pql.config import Config
from pql.config.algorithms import RECORDS
from pql.config.compose import RESUMABLE, RESUMABLE_TOO, known_settings
from pql.config.fields import reads, settings
from pql.config.layers import GROUPS, Presets

if TYPE_CHECKING:
    from pql.cli.parser import Command

BASH = """\
_pql() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##*[[:space:]]}"
    COMPREPLY=($("${COMP_WORDS[0]}" completion --words "$line" 2>/dev/null))
    # Bash breaks words at '=' and ':': text up to the last of these is already on the line.
    local have="${word%"${word##*[=:]}"}"
    [[ -n $have && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"$have"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
}
complete -o default -F _pql pql
"""

ZSH = """\
#compdef pql
_pql() {
    local -a found=("${(@f)$(${words[1]} completion --words "${LBUFFER}" 2>/dev/null)}")
    found=(${found:#})
    if (( ! $#found )); then _files; return; fi
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
}
if [ "$funcstack[1]" = "_pql" ]; then _pql "$@"; else compdef _pql pql; fi
"""

FISH = """\
complete -c pql -f -n '__fish_seen_subcommand_from train sweep warm-up profile list doctor completion'
complete -c pql -a '(pql completion --words (commandline -cp) 2>/dev/null)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

ONLY = {"list": ("tasks", "algos", "games"), "completion": tuple(SCRIPTS), "doctor": ("--env", "--num-envs", "--steps")}
OWN = {
    "device": ("auto", "cpu", "cuda"),
    "sampler": SAMPLERS,
    "objective": OBJECTIVES,
    "prune": AXES,
    "pruner": PRUNERS,
    "x": ("seconds", "env_steps", "updates"),
    "formats": ("pt2", "onnx"),
    "scale": ("true", "false"),
}
# The first word is a path, for the shell.
RUN_FIRST = ("resume", "eval", "play", "record", "export", "compare", "report", "watch", "pull", "push")


def candidates(line: str, commands: "Mapping[str, Command]") -> list[str]:
    """Return words that may replace the last word of ``line``. Empty if it may be a file name.

    Names are completed a part at a time: ``algo.cr`` -> ``algo.critic.``, then ``algo.critic.lr=``.
    """
    words = line.split()
    if line[-1:].isspace() or not words:
        words.append("")
    *before, word = words
    if len(before) < 2:
        found: Iterable[str] = commands if before else ()
    elif (command := before[1]) in ONLY:
        from pql.envs import BUILTIN

        found = sorted(BUILTIN) if before[-1] == "--env" else ONLY[command]
    elif word.startswith("-"):
        found = commands[command].options if command in commands else ()
    elif command in RUN_FIRST and len(before) == 2:
        found = ()
    elif "=" in word:
        found = setting_values(command, word)
    elif command in ("compare", "report") and not word:
        found = ()  # probably another run
    else:
        chosen = next((w.removeprefix("algo=") for w in before if w.startswith("algo=")), "pql")
        algo = chosen if chosen in Presets().names("algo") else None
        own = commands[command].own if command in commands else ()
        found = next_parts(word, [*setting_names(command, algo), *own])
    return [w for w in found if w.startswith(word)]


def setting_names(command: str, algo: str | None = None) -> list[str]:
    """Return names of settings, of runs and of the tool, that may precede ``=`` after ``pql command``. ``algo``: the
    preset already named on the line; None: settings of every algorithm."""
    known = [*known_settings()] if algo is None else [name for name in known_settings() if is_of(name, algo)]
    if command == "train":
        return [*GROUPS, *known, "multirun_dir"]
    if command in ("warm-up", "profile"):
        return [*GROUPS, *known]
    if command == "sweep":
        return [*GROUPS, *known, *(f.name for f in fields(Settings))]
    if command == "resume":
        return [s for s in known if s.partition(".")[0] in RESUMABLE or s in RESUMABLE_TOO]
    return []


def is_of(name: str, algo: str) -> bool:
    """Return True if the algorithm of the preset ``algo`` reads the setting ``name``."""
    record = RECORDS.get(Presets().family(algo))  # other families would import their packages, and those torch
    return record is None or not name.startswith("algo.") or reads(Config(algo=record()), name)


def next_parts(word: str, found: Sequence[str]) -> list[str]:
    """Return the next part of dotted names that begin with ``word``: up to the next dot, or ``=`` at their end."""
    parts = []
    for name in found:
        if name.startswith(word):
            dot = name.find(".", len(word))
            parts.append(name[: dot + 1] if dot >= 0 else f"{name}=")
    return list(dict.fromkeys(parts))


def setting_values(command: str, word: str) -> list[str]:
    """Complete values: ``algo=p`` -> ``algo=pql``, ...; after a comma (``pql train -m``), the next value."""
    key, _, text = word.partition("=")
    head = f"{key}={text[: text.rfind(',') + 1]}"
    allowed: Sequence[str] = ()
    if key in GROUPS and command in ("train", "sweep", "warm-up", "profile", "resume"):
        allowed = Presets().names(key)
    elif key in OWN:
        allowed = OWN[key]
    elif choices := choices_of(key):
        allowed = choices
    elif known_settings().get(key) is bool:
        allowed = ("true", "false")
    return [head + value for value in allowed]


def choices_of(name: str) -> tuple[str, ...]:
    """Return the values that a setting accepts in any algorithm, if they are enumerable."""
    found = (one for record in RECORDS.values() for one in settings(Config(algo=record())) if one.name == name)
    return tuple(dict.fromkeys(choice for one in found for choice in one.declaration.choices))
