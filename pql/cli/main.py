"""Command line: runs one command. Errors that a user can correct are one line and exit status 2."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from pql.cli.parser import COMMANDS, parser, presets_as_setting
from pql.engine import crash
from pql.engine.world import world
from pql.errors import VERBOSE, ConfigError, HungError, PqlError, PqlWarning, first_line, nearest, with_cause

SIMULATING = ("train", "resume", "eval", "play", "record", "export", "warm-up", "profile", "actor")
"""Commands that run native code of simulators, whose crashes are reported by a second process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status (docs/troubleshooting.md, How a command ends)."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    crash.report_crashes(speaker() if words[0] in SIMULATING else None)
    crash.name_thread("the main thread")
    plain, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise ConfigError("command", words[0], f"one of {', '.join(COMMANDS)}{nearest(words[0], COMMANDS)}")
        args = parser().parse_args(presets_as_setting(words))
        check_alone(words[0], getattr(args, "multirun", False))
        with verbosely() if getattr(args, "verbose", False) else contextlib.nullcontext():
            return args.run(args)
    except ConfigError as error:
        print(f"{speaker()}: {error}", file=sys.stderr)
        return 2
    except PqlError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print_cause(error, str(error))
        return leave_at_once(error) if argv is None else 1
    except KeyboardInterrupt as error:  # before or after the part of a run that can be saved
        print(f"pql: interrupted: {error}" if error.args else "pql: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has left: ``pql list tasks | head``
        if words[0] != "sweep" and not {"-m", "--multirun"} & {*words}:
            raise
        print("pql: the output was closed before all runs were done: give the same command again", file=sys.stderr)
        return 1
    except Exception as error:  # of a simulator, of the disk, or of this package
        traceback.print_exception(error)
        what = "make room or choose another place" if isinstance(error, OSError) else "the lines above say where"
        print_cause(error, f"{words[0]} failed: {first_line(error)}; {what}")
        return leave_at_once(error) if argv is None else 1
    finally:
        warnings.formatwarning = plain


@contextlib.contextmanager
def verbosely() -> Iterator[None]:
    """Context manager: let simulators print, also those in processes that start inside."""
    before = os.environ.get(VERBOSE)
    os.environ[VERBOSE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VERBOSE]


def leave_at_once(error: BaseException | None) -> int:
    """Return 1; end the process instead, without freeing anything, where that would hang or crash.

    A hung thread keeps the process alive. After an error of a kernel, freeing a tensor of the device aborts it.
    """
    torch = sys.modules.get("torch")
    while error is not None:
        if isinstance(error, HungError) or (torch and isinstance(error, torch.AcceleratorError)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        error = error.__cause__
    return 1


def print_cause(error: Exception, text: str) -> None:
    """Print ``text``, whose last line names the cause, and on that line what is kept: the notes of ``error``."""
    print("; ".join([with_cause(f"{speaker()}: ", text), *getattr(error, "__notes__", ())]), file=sys.stderr)


def speaker() -> str:
    """Prefix of an error message: ``pql``, with the rank if there are several processes."""
    rank = 0
    with contextlib.suppress(ConfigError):  # it may be the error that is being printed
        rank = world().rank
    return f"pql, rank {rank}" if rank else "pql"


def check_alone(command: str, multirun: bool) -> None:
    """Raises ``ConfigError`` if several processes were started for a command that needs one."""
    if (multirun or command not in ("train", "resume")) and world().size > 1:
        command += " -m" * multirun
        raise ConfigError("command", command, "train or resume: under torchrun, all processes make one run")


def _format_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Format a warning of this package as one line, all others as Python does."""
    if issubclass(category, PqlWarning):
        return f"pql: warning: {message}\n"
    return f"{where[0]}:{where[1]}: {category.__name__}: {message}\n"


if __name__ == "__main__":
    sys.exit(main())
