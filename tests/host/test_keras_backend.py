"""Backend of Keras, found before Keras is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from nfdt_client.capture import capture
from nfdt_client.options import resolve
from nfdt_client.patch import bind

from nfdt.core.errors import CaptureError
from nfdt.core.host.keras_backend import configured_backend, require_backend, require_tensorflow
from tests.support.scripts import DEADLINE_S, NFDT

REFUSED = "Keras on another backend cannot be distributed"


@pytest.fixture
def keras_json(tmp_path):
    """Write keras.json in the directory that the returned environment names."""

    def write(text: str) -> dict[str, str]:
        (tmp_path / "keras.json").write_text(text)
        return {"KERAS_HOME": str(tmp_path)}

    return write


@pytest.fixture
def use(monkeypatch):
    """Set the environment, and the backend that Keras has loaded, if any."""

    def use(environ: dict[str, str], loaded: str | None = None) -> None:
        for name in ("KERAS_HOME", "KERAS_BACKEND"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        keras = None if loaded is None else SimpleNamespace(config=SimpleNamespace(backend=lambda: loaded))
        monkeypatch.setitem(sys.modules, "keras", keras)

    return use


def test_the_variable_counts_before_the_file(keras_json):
    environ = keras_json('{"backend": "jax"}')
    assert configured_backend({**environ, "KERAS_BACKEND": "torch"}).name == "torch"
    assert configured_backend({**environ, "KERAS_BACKEND": ""}).name == "jax"


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"floatx": "float32"}'])
def test_a_file_without_a_backend_leaves_the_default(keras_json, text):
    assert configured_backend(keras_json(text)).name == "tensorflow"


def test_a_file_that_is_not_there_leaves_the_default(tmp_path):
    assert configured_backend({"KERAS_HOME": str(tmp_path)}).name == "tensorflow"


def test_the_message_names_the_place_and_the_remedy(keras_json, tmp_path, use):
    use(keras_json('{"backend": "numpy"}'))
    with pytest.raises(CaptureError, match=f"'numpy' .{tmp_path}/keras.json.*KERAS_BACKEND=tensorflow"):
        require_backend()
    use({"KERAS_BACKEND": "openvino"})
    with pytest.raises(CaptureError, match="'openvino' .KERAS_BACKEND in the environment"):
        require_backend()


@pytest.mark.parametrize("name", ["tensorflow", "jax", "torch"])
def test_workers_train_on_three_backends(name, use):
    use({"KERAS_BACKEND": name})
    require_backend()


def test_ranks_train_on_one(use):
    use({"KERAS_BACKEND": "jax"})
    with pytest.raises(CaptureError, match="ranks compute with 'tensorflow'.*Received: 'jax'"):
        require_tensorflow("ranks compute")


def test_a_loaded_backend_counts_alone(use):
    use({"KERAS_BACKEND": "numpy"}, loaded="tensorflow")
    require_backend()
    use({"KERAS_BACKEND": "tensorflow"}, loaded="numpy")
    with pytest.raises(CaptureError, match="'numpy'"):
        require_backend()


def test_this_process_agrees_with_keras():
    keras = pytest.importorskip("keras")
    environ = {name: value for name, value in os.environ.items() if name.startswith("KERAS_")}
    assert configured_backend(environ).name == keras.config.backend() == "tensorflow"


def run_on_numpy(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KERAS_BACKEND": "numpy"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_command_refuses_it_before_the_script_begins(tmp_path, command):
    script = tmp_path / "train.py"
    script.write_text("print('loading data')")
    done = run_on_numpy(*NFDT, command, str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {REFUSED}")


@pytest.mark.parametrize("call", ["distribute(workers=2)", "session()", "submit(print, server='127.0.0.1:1')"])
def test_a_function_refuses_it_before_anything_is_started(call):
    done = run_on_numpy(sys.executable, "-c", f"import nfdt\nnfdt.{call}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"nfdt.core.errors.CaptureError: {REFUSED}")


def test_a_variable_that_is_set_too_late_causes_a_warning(monkeypatch, caplog):
    keras = pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    capture(model, bind(keras.Model.fit, model, (np.ones((2, 3)), np.ones((2, 1))), {}), resolve({}))
    assert "KERAS_BACKEND=jax has no effect" in caplog.text
