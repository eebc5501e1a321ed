"""Entry point of ``pql`` and ``python -m pql``. Ctrl-C prints one line, even while modules are loading."""

import sys


def main() -> int:
    """Run ``pql.cli.main.main`` on this program's arguments."""
    try:
        from pql.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("pql: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
