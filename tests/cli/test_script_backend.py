"""Backend of Keras that the text of a script sets."""

from __future__ import annotations

import pytest

from nfdt.cli.script import Script, set_backend_of


@pytest.fixture
def backend(tmp_path):
    def backend(source: str, inherited: str = "") -> str | None:
        path = tmp_path / "train.py"
        path.write_text(source)
        environ = {"KERAS_BACKEND": inherited} if inherited else {}
        set_backend_of(Script(str(path)), environ)
        return environ.get("KERAS_BACKEND")

    return backend


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras",
        "from os import environ\nenviron['KERAS_BACKEND'] = 'jax'",
        "import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')",
    ],
)
def test_it_is_found_where_scripts_set_it(backend, source):
    assert backend(source) == "jax"


def test_a_default_leaves_the_environment_and_an_assignment_does_not(backend):
    assert backend("import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')", "torch") == "torch"
    assert backend("import os\nos.environ['KERAS_BACKEND'] = 'jax'", "torch") == "jax"


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['OTHER'] = 'jax'",
        "import os\nos.environ['KERAS_BACKEND'] = choose()",
        "def choose():\n    os.environ['KERAS_BACKEND'] = 'jax'",
        "settings['KERAS_BACKEND'] = 'jax'",
        "no python at all",
    ],
)
def test_anything_else_is_left_to_the_script(backend, source):
    assert backend(source) is None


def test_a_file_that_is_not_there_is_reported_by_its_run(tmp_path):
    environ = {}
    set_backend_of(Script(str(tmp_path / "none.py")), environ)
    set_backend_of(Script("package.module", is_module=True), environ)
    assert environ == {}
