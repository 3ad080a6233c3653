"""Code of jobs on a server of root: it trains, and the kernel keeps from it what is not its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, ServerProcess, environment, start_server, start_workers, stop

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3 * DEADLINE_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user"),
]

FOUND = "found by the layer: "
# Its layer looks about when a worker, and each shard, builds the model.
HOSTILE = """
import os, signal


def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done"


@keras.saving.register_keras_serializable("hostile")
class Looks(keras.layers.Layer):
    def call(self, inputs):
        if os.getpid() != CLIENT:
            found = {path: attempt(open, path, "rb") for path in PATHS}
            found |= {f"folder {path}": attempt(os.listdir, path) for path in FOLDERS}
            found |= {f"change {path}": attempt(open, path, "ab") for path in PATHS}
            found |= {f"signal {process}": attempt(os.kill, process, 0) for process in PROCESSES}
            found["root again"] = attempt(os.setuid, 0)
            links = [attempt(os.readlink, f"/proc/self/fd/{one}") and os.path.realpath(f"/proc/self/fd/{one}")
                     for one in os.listdir("/proc/self/fd")]
            mine = {"user": [os.getresuid(), os.getresgid(), os.getgroups()], "files": links, "home": os.getcwd()}
            open("mine", "w").write("its own folder is writable")
            print(MARK + json.dumps({"found": found, **mine}))
        return inputs


model = build()
model.add(Looks())
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print(json.dumps(history.history))
"""


def run(server: ServerProcess, folder: Path, text: str, *options: str, **names: object) -> str:
    """Run a script and return what it and its workers have printed."""
    script = folder / "script.py"
    script.write_text(DIGITS + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + text)
    done = subprocess.run(
        [*NFDT, "run", "--workers", "1", *options, str(script)],
        env=environment(**server.env()),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr
