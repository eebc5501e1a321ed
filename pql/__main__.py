"""``pql`` and ``python -m pql``: the command line. From here on Ctrl-C gives one line, while modules load, too."""

import sys


def main() -> int:
    """As ``pql.cli.main.main``, on this program's arguments."""
    try:
        from pql.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("pql: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
