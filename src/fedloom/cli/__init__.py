"""The command ``fedloom``."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from fedloom.errors import FedloomError, UserError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and leaves with its status: 0 done, 2 the user's mistake (one line on stderr), 1 anything else.

    Args:
        argv: the words behind ``fedloom``; None for those of the process. ``--debug`` anywhere shows tracebacks.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    sys.exit(_status([w for w in words if w != "--debug"], debug))


def _status(words: list[str], debug: bool) -> int:
    import click

    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = lambda message, *rest, **more: _say(f"warning: {message}")
            from fedloom.cli.app import app

            answer = app(words, prog_name="fedloom", standalone_mode=False)
            sys.stdout.flush()
            return answer if isinstance(answer, int) else 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        _say(error.format_message())
        return 2 if isinstance(error, click.UsageError) else 1
    except (click.exceptions.Abort, KeyboardInterrupt):
        _say("stopped")
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has nowhere to go
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, FedloomError):
            _say(str(error))
        else:
            _say(f"{type(error).__name__}: {error} (this is a bug in fedloom or in a model; --debug shows where)")
        return 2 if isinstance(error, UserError) else 1


def _say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write("fedloom: " + " ".join(text.split()) + "\n")
