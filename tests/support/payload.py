"""A pickle that does something: makes a folder when it is read."""

import os
import pickle
from pathlib import Path
from typing import Any


class Payload:
    """Makes the folder ``mark`` when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def check_payload(mark: Path) -> None:
    """Assert that the payload is a real one and was not executed before."""
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.is_dir()
