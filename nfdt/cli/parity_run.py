"""One training of a script for ``nfdt parity``: plain, or on workers; its fits are written as JSON.

``python -m nfdt.cli.parity_run RESULT REPETITION OPTIONS SCRIPT...``: OPTIONS are those of a session as a JSON object,
``null`` for plain Keras; SCRIPT is as on Python's command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nfdt.cli.options import log_to_stderr
from nfdt.cli.process import quiet_start
from nfdt.cli.script import Script, describe_failure, exit_code_of, run_script


def train(script: Script, repetition: int, options: Mapping[str, Any] | None) -> list[list[dict[str, Any]]]:
    """Run the script and return its fits, as of :func:`nfdt_client.recorded_fits.recorded_fits`."""
    from nfdt_client.decorator import session
    from nfdt_client.recorded_fits import recorded_fits

    with ExitStack() as stack:
        with quiet_start():
            if options is not None:
                stack.enter_context(session(options=options))
            fits = stack.enter_context(recorded_fits(repetition))
        run_script(script)
    return fits


def main(arguments: Sequence[str]) -> int:
    """Train once and return the exit code."""
    log_to_stderr("warning")
    result, repetition, options, *words = arguments
    is_module = words[0] == "-m"
    name, *rest = words[1:] if is_module else words
    try:
        fits = train(Script(name, tuple(rest), is_module), int(repetition), json.loads(options))
    except BaseException as error:
        if message := describe_failure(error):
            print(message, file=sys.stderr)
        return exit_code_of(error)
    Path(result).write_text(json.dumps(fits), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
