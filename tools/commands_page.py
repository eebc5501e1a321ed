"""Write ``docs/reference/commands.md``, the reference of the command line, from its parser.

python tools/commands_page.py
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from pql.cli.parser import parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Command line

`pql COMMAND --help` prints the same. Settings are written `key=value`, in any order; options have dashes.
`tools/commands_page.py` writes this page from the parser.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        what, _, example = about[name].partition(": ")
        parts += [f"## pql {name}\n", f"{what[0].upper()}{what[1:]}.\n", f"```\n{example}\n```\n"]
        parts += [*table(command), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def table(command: argparse.ArgumentParser) -> Iterator[str]:
    """Return one row for each argument of a command, without ``--help``."""
    rows = [
        (written(a), (a.help or "").replace("|", "\\|")) for a in command._actions if "--help" not in a.option_strings
    ]
    if rows:
        yield "| argument | |"
        yield "|---|---|"
    for name, help_text in rows:
        yield f"| `{name}` | {help_text} |"


def written(action: argparse.Action) -> str:
    """Return an argument as a user writes it."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    value = " or ".join(map(str, action.choices) if action.choices else metavar.split("|"))  # tables have no bars
    if action.option_strings:
        return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    return f"[{value} ...]" if action.nargs == "*" else f"{value} ..." if action.nargs == "+" else value


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
