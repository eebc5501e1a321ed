"""Write ``docs/settings.md``, the reference of all settings, from their declarations.

python tools/settings_page.py
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pql.cli.explain import allowed, condition, shown
from pql.config import Config
from pql.config.algorithms import RECORDS
from pql.config.fields import Setting, settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

All settings of `pql train`, with the defaults of the schema. Presets (`pql/config/presets`) set other values for many
of them. "With X" in the last column: the setting is read only if X holds, and refused otherwise.
`pql train ... --cfg` prints a run's values and the source of each; `pql train --help algo=NAME` prints the
settings that one algorithm reads at this machine's scale. `tools/settings_page.py` writes this page from the settings'
declarations.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    shared = [one for one in settings(Config()) if not one.name.startswith("algo.")]
    parts += ["## Every run\n", *table(shared)]
    known: dict[str, str] = {}
    for family, record in RECORDS.items():
        found = [*settings(record(), "algo.")]
        # Conditions and texts may differ between families, so a row is left out only where all of it is equal.
        new = [one for one in found if known.get(one.name) != row(one)]
        parts += [f"\n## Algorithms of the family `{family}`\n", f"{(record.__doc__ or '').strip()}\n"]
        if len(new) < len(found):
            again = ", ".join(f"`{one.name}`" for one in found if known.get(one.name) == row(one))
            parts.append(f"As above: {again}.\n")
        parts += table(new)
        known = {**{one.name: row(one) for one in found}, **known}
    return "\n".join(parts) + "\n"


def table(found: Sequence[Setting]) -> Iterator[str]:
    """Return one row for each setting."""
    yield "| setting | default | allowed | |"
    yield "|---|---|---|---|"
    for one in found:
        yield row(one)


def row(one: Setting) -> str:
    """Return a setting's row."""
    cells = (f"`{one.name}`", f"`{shown(one.value)}`", allowed(one), f"{one.declaration.doc}{condition(one)}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
