"""Memory that slots keep between two jobs."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest

import nfdt
from nfdt.jobserver.main import ServerOptions, serve

pytestmark = pytest.mark.processes

TOKEN = "secret-token"
KEEPS_NOTHING = "import sys, nfdt.worker.slot; nfdt.worker.slot.IDLE_BYTES = 0; sys.exit(nfdt.worker.slot.main())"


@pytest.mark.long
def test_slots_that_keep_much_memory_are_replaced_between_two_jobs(tmp_path):
    server = serve(
        ServerOptions(tmp_path / "state", (TOKEN,), workers=1, slot_command=(sys.executable, "-c", KEEPS_NOTHING))
    )
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
    processes = []
    try:
        with nfdt.session(server=server.address, options={"token_file": str(tmp_path / "token")}, workers=1):
            for _ in range(2):
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                model.fit(x, x[:, :1], batch_size=16, epochs=1, verbose=0)
                processes += [worker["pid"] for worker in model.history.nfdt.values() if "pid" in worker]
    finally:
        server.stop()
    first, second = processes
    assert first != second
