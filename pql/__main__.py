"""Entry point of ``pql`` and ``python -m pql``. Ctrl-C prints one line, even while modules are loading."""

import os
import sys


def main() -> int:
    """Run ``pql.cli.main.main`` on this program's arguments."""
    status = 0
    try:
        from pql.cli.main import main as command

        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("pql: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # ``pql list tasks | head``: the reader has all it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
        return status


if __name__ == "__main__":
    sys.exit(main())
