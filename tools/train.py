"""``python tools/train.py key=value ...`` is ``pql train key=value ...``."""

import sys

from pql.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
