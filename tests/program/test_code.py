"""Transfer of code by value, between real processes."""

import json
import os
import subprocess
import sys

import pytest

from nfdt.core.errors import PolicyRefused, ProtocolError, VersionMismatch
from nfdt.model.program.code import dump_objects, load_code, load_objects
from nfdt.model.program.manifest import Manifest

pytestmark = pytest.mark.processes

HELPER = """
FACTOR = 3.0
def factor():
    return FACTOR
"""

SCRIPT = """
import sys, pathlib
sys.path.insert(0, {folder!r})
import keras, numpy as np
import my_helper
from my_helper import factor

class Tripled(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)
    def call(self, x):
        return self.dense(x) * factor() + my_helper.FACTOR

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = Tripled(2)
    def call(self, x):
        return self.inner(x)

model = Net()
model.compile("adam", lambda y, p: keras.ops.mean((y - p) ** 2) * factor())
x = np.arange(12, dtype="f4").reshape(3, 4)

from nfdt.model.program.pack import pack
packed = pack(model, (x, np.zeros((3, 2), "f4")))
out = pathlib.Path({out!r})
(out / "manifest").write_bytes(packed.manifest.to_bytes())
for name, data in packed.artifacts.items():
    (out / name).write_bytes(data)
print(model.predict(x, verbose=0).tolist())
"""

WORKER = """
import json, pathlib, numpy as np
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.unpack import unpack
folder = pathlib.Path({out!r})
manifest = Manifest.from_bytes((folder / "manifest").read_bytes())
model = unpack(manifest, lambda n: (folder / n).read_bytes(), allow_code=True)
print(model.predict(np.arange(12, dtype="f4").reshape(3, 4), verbose=0).tolist())
"""


def run(path, cwd):
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_classes_of_a_script_and_its_modules_run_where_neither_exists(tmp_path):
    scripts, worker, out = (tmp_path / name for name in ("scripts", "worker", "out"))
    for folder in (scripts, worker, out):
        folder.mkdir()
    (scripts / "my_helper.py").write_text(HELPER)
    (scripts / "train.py").write_text(SCRIPT.format(folder=str(scripts), out=str(out)))
    (worker / "work.py").write_text(WORKER.format(out=str(out)))
    assert run(scripts / "train.py", scripts) == run(worker / "work.py", worker)


def manifest(**changes):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Manifest({"kind": "code", "code": "it", "versions": {"python": version}, **changes})


def test_code_keeps_the_name_of_its_file_in_brackets():
    def outer():
        return lambda: 1

    dumped = dump_objects({"f": outer}).data
    own = load_objects(manifest(), "it", lambda _: dumped, {})["f"]
    assert {code.co_filename for code in (own.__code__, own().__code__)} == {f"<{__file__}>"}


def test_code_is_not_even_read_without_permission():
    with pytest.raises(PolicyRefused, match="--allow-code"):
        load_code(manifest(), lambda _: pytest.fail("read"), allow_code=False)


def test_code_of_another_python_is_not_even_read():
    with pytest.raises(VersionMismatch, match=r"2\.7"):
        load_code(manifest(versions={"python": "2.7"}), lambda _: pytest.fail("read"), allow_code=True)


def test_code_that_cannot_be_loaded_is_reported():
    with pytest.raises(ProtocolError, match="cannot be loaded here"):
        load_code(manifest(), lambda _: b"nonsense", allow_code=True)


def test_objects_come_back_by_name():
    objects = load_code(manifest(), lambda _: dump_objects({"job>f": lambda: 7}).data, allow_code=True)
    assert objects["job>f"]() == 7
    assert load_code(manifest(kind="config", code=None), lambda _: b"", allow_code=False) == {}


def test_what_another_installation_has_is_not_shipped(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "installed_elsewhere.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(packages)
    import installed_elsewhere

    pickled = dump_objects({"job>f": installed_elsewhere.f}).data
    monkeypatch.delitem(sys.modules, "installed_elsewhere")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(packages)])
    with pytest.raises(ProtocolError, match="installed_elsewhere"):
        load_code(manifest(), lambda _: pickled, allow_code=True)


def install_into(folder, name, package, source):
    """Lay a package out as ``pip install --target`` does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


@pytest.mark.feature("Packages installed with `pip install --target`", area="Models")
def test_a_package_installed_into_a_folder_is_not_shipped_and_its_lack_names_it(tmp_path, monkeypatch):
    install_into(tmp_path, "targeted", "the-targeted", "def f():\n    return 1\n")
    (tmp_path / "beside_it.py").write_text("import targeted\n\n\ndef g():\n    return targeted.f()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_it

    dumped = dump_objects({"job>g": beside_it.g})
    pickled, own = dumped.data, dumped.code
    assert own == [beside_it.g]
    assert load_code(manifest(), lambda _: pickled, allow_code=True)["job>g"]() == 1
    for name in ("targeted", "beside_it"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    with pytest.raises(ProtocolError, match="No module named 'targeted'.*package the-targeted 1.5, .* install it here"):
        load_code(manifest(), lambda _: pickled, allow_code=True)


FUNCTIONAL = """
import keras

class Tiny(keras.Model):
    def __init__(self, units):
        inputs = keras.Input((4,))
        super().__init__(inputs=inputs, outputs=keras.layers.Dense(units, name="out")(inputs))
        self.units = units
"""

USES_FUNCTIONAL = """
import pathlib, sys
import keras, numpy as np
import tinyhub
from nfdt.model.program.pack import pack

class Mine(tinyhub.Tiny):
    pass

for number, kind in enumerate((tinyhub.Tiny, Mine)):
    model = kind(2)
    model.compile("sgd", "mse")
    packed = pack(model, (np.ones((3, 4), "f4"), np.zeros((3, 2), "f4")))
    out = pathlib.Path(sys.argv[1]) / str(number)
    out.mkdir()
    (out / "manifest").write_bytes(packed.manifest.to_bytes())
    for name, data in packed.artifacts.items():
        (out / name).write_bytes(data)
"""

BUILDS_FUNCTIONAL = """
import pathlib, sys
import keras, numpy as np
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.unpack import unpack

for number, name in enumerate(("Tiny", "Mine")):
    folder = pathlib.Path(sys.argv[1]) / str(number)
    manifest = Manifest.from_bytes((folder / "manifest").read_bytes())
    model = unpack(manifest, lambda n: (folder / n).read_bytes(), allow_code=True)
    print(type(model).__name__, model.units, [layer.name for layer in model.layers][1:], model(np.ones((3, 4))).shape)
"""


@pytest.mark.long
@pytest.mark.feature("Classes of packages that call `super().__init__(inputs, outputs)` (KerasHub)", area="Models")
def test_a_graph_of_an_installed_class_is_one_where_no_constructor_ran(tmp_path):
    packages, out = tmp_path / "site-packages", tmp_path / "out"
    out.mkdir()
    install_into(packages, "tinyhub", "tinyhub", FUNCTIONAL)
    printed = ""
    for name, source in (("script.py", USES_FUNCTIONAL), ("worker.py", BUILDS_FUNCTIONAL)):
        (tmp_path / name).write_text(source)
        environment = {**os.environ, "PYTHONPATH": str(packages), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, str(tmp_path / name), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert printed.splitlines() == [f"{name} 2 ['out'] (3, 2)" for name in ("Tiny", "Mine")]
