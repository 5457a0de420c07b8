"""`distbench` and `python -m distbench`: the command line, and the handling of internal errors.

No command ends with a traceback: its exit code would be 1, which `distbench gate` reserves for a regression.
"""

import contextlib
import os
import sys
from pathlib import Path

USER_ERROR, UNFORESEEN, INTERRUPTED, PIPE_CLOSED = 2, 70, 130, 141


def start() -> None:
    """Run the command line and exit with the command's code, or 70 for an internal error."""
    try:
        Path.cwd()
    except OSError:
        _end(USER_ERROR, "the current folder no longer exists; change to an existing folder")
    try:
        _run()
    except BrokenPipeError:
        # The reader of the output has closed the pipe, and needs no message.
        _drop_output()
        sys.exit(PIPE_CLOSED)
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted")
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:
            _require_output()
        _end(UNFORESEEN, unforeseen(error))


def _run() -> None:
    # Imports run inside the guard, because a module on the path may shadow one.
    from distbench.cli.main import main
    from distbench.processes.signals import end_by_interrupt

    end_by_interrupt()
    try:
        # The shell's completion requires this name, also for `python -m distbench`.
        main(prog_name="distbench")
    finally:
        # Report a failed flush here, not in the interpreter's shutdown.
        if sys.stdout is not None:
            sys.stdout.flush()


def _require_output() -> None:
    """End with a sentence if standard output cannot be written."""
    try:
        os.write(1, b"\n")
    except OSError as error:
        _drop_output()
        _end(
            USER_ERROR, f"standard output cannot be written ({error.strerror}); run files and other outputs are intact"
        )


def unforeseen(error: Exception) -> str:
    """Return a sentence on an internal error, and write its traceback to a file."""
    import tempfile
    import traceback

    error_text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    try:
        handle, name = tempfile.mkstemp(prefix="distbench-", suffix=".txt")
        with os.fdopen(handle, "w", errors="backslashreplace") as file:
            file.write("".join([f"{' '.join(sys.argv)}\n", *traceback.format_exception(error)]))
    except OSError:
        traceback.print_exception(error)
        return f"internal error ({error_text}); please report it with the traceback above"
    return f"internal error ({error_text}); please report it with the traceback in {Path(name)}"


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(code: int, message: str) -> None:
    # Standard error may be full or closed too, and the exit code still counts.
    with contextlib.suppress(OSError):
        print(f"distbench: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    start()
