"""Write the pages of the reference that are generated: docs/settings.md and docs/reference/commands.md.

python tools/pages.py
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from pql.cli.explain import allowed, condition, shown
from pql.cli.parser import parser
from pql.config import Config
from pql.config.algorithms import RECORDS
from pql.config.fields import Setting, settings

DOCS = Path(__file__).resolve().parents[1] / "docs"
SETTINGS = """# Settings

All settings of `pql train`, with the defaults of the schema. Presets (`pql/config/presets`) set other values for many
of them. "With X" in the last column: the setting is read only if X holds, and refused otherwise.
`pql train ... --cfg` prints a run's values and the source of each; `pql train --help algo=NAME` prints the
settings that one algorithm reads at this machine's scale. `tools/pages.py` writes this page from the settings'
declarations.
"""
LIVE = " May change when a run is resumed."
COMMANDS = """# Command line

`pql COMMAND --help` prints the same. Settings are written `key=value`, in any order; options have dashes.
`tools/pages.py` writes this page from the parser.
"""


def settings_page() -> str:
    """Return the page of all settings, from their declarations."""
    shared = [one for one in settings(Config()) if not one.name.startswith("algo.")]
    parts = [SETTINGS, "## Every run\n", *setting_rows(shared)]
    known: dict[str, str] = {}
    for family, record in RECORDS.items():
        found = [*settings(record(), "algo.")]
        # Conditions and texts may differ between families, so a row is left out only where all of it is equal.
        new = [one for one in found if known.get(one.name) != row(one)]
        parts += [f"\n## Algorithms of the family `{family}`\n", f"{(record.__doc__ or '').strip()}\n"]
        if len(new) < len(found):
            again = ", ".join(f"`{one.name}`" for one in found if known.get(one.name) == row(one))
            parts.append(f"As above: {again}.\n")
        parts += setting_rows(new)
        known = {**{one.name: row(one) for one in found}, **known}
    return "\n".join(parts) + "\n"


def setting_rows(found: Sequence[Setting]) -> Iterator[str]:
    """Yield the lines of a table with a row for each setting."""
    yield from ("| setting | default | allowed | |", "|---|---|---|---|")
    yield from map(row, found)


def row(one: Setting) -> str:
    """Return a setting's row."""
    more = f"{condition(one)}{LIVE * one.declaration.live}"
    cells = (f"`{one.name}`", f"`{shown(one.value)}`", allowed(one), f"{one.declaration.doc}{more}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def commands_page() -> str:
    """Return the page of the command line, from its parser."""
    parts = [COMMANDS]
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        what, _, example = about[name].partition(": ")
        parts += [f"## pql {name}\n", f"{what[0].upper()}{what[1:]}.\n", f"```\n{example}\n```\n"]
        parts += [*argument_rows(command), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def argument_rows(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a table with a row for each argument of a command, without ``--help``."""
    actions = [a for a in command._actions if "--help" not in a.option_strings]
    if actions:
        yield from ("| argument | |", "|---|---|")
    for action in actions:
        text = (action.help or "").replace("|", "\\|")
        yield f"| `{written(action)}` | {text} |"


def written(action: argparse.Action) -> str:
    """Return an argument as a user writes it."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    value = " or ".join(map(str, action.choices) if action.choices else metavar.split("|"))  # tables have no bars
    if action.option_strings:
        return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    return f"[{value} ...]" if action.nargs == "*" else f"{value} ..." if action.nargs == "+" else value


PAGES = {DOCS / "settings.md": settings_page, DOCS / "reference" / "commands.md": commands_page}

if __name__ == "__main__":
    for file, page in PAGES.items():
        file.write_text(page())
        print(file)
