"""The source distribution and the wheel made of it: metadata, and a training outside of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import HeaderParser
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

import nfdt
from tests.support.scripts import DEADLINE_S, environment

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "nfdt", "hfdt", "client")
URL = "https://forge.invalid/someone/nfdt"
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
SCRIPT = """
import keras, numpy as np
import nfdt
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 4), "float32"), np.ones((64, 1), "float32"), epochs=2, verbose=0)
print(nfdt.__file__, sorted(model.history.nfdt))
"""


def build(what: str, source: Path, target: Path) -> Path:
    """Build ``sdist`` or ``wheel`` as ``python -m build --no-isolation`` does."""
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(target)]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, "NFDT_URL": URL}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    packed = build("sdist", source, folder)
    with tarfile.open(packed) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in Python 3.11.2, that of Debian 12
        archive.extractall(folder, **safe)
    return build("wheel", folder / packed.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """Install the wheel into a folder."""
    target = wheel.parent / "installed"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return target


@pytest.fixture(scope="module")
def distribution(installed) -> Distribution:
    (folder,) = installed.glob("nfdt-*.dist-info")
    return PathDistribution(folder)


def test_the_version_is_the_same_everywhere(distribution):
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert [distribution.version] == cited == [nfdt.__version__]


def test_links_of_the_description_are_absolute(distribution):
    text = HeaderParser().parsestr(distribution.read_text("METADATA") or "").get_payload()
    links = re.findall(r"\]\(([^)]*)\)", str(text))
    assert f"{URL}/raw/v{nfdt.__version__}/docs/images/unequal.svg" in links
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"Source, {URL}/" in distribution.metadata.get_all("Project-URL")


def test_a_script_trains_with_the_wheel_outside_of_the_repository(installed, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "nfdt.cli", "run", "--workers", "1", "train.py"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(installed)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{installed / 'nfdt' / '__init__.py'} ['worker-0']\n"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_and_what_it_needs_train_on_other_pythons(wheel, tmp_path, version):
    command = [shutil.which(f"python{version}") or "", "-m", "venv", str(tmp_path / "env")]
    if not command[0] or subprocess.run(command, capture_output=True, timeout=DEADLINE_S).returncode:
        pytest.skip(f"there is no Python {version} here")
    python = str(tmp_path / "env" / "bin" / "python")
    alone = environment(PYTHONPATH="")
    subprocess.run([python, "-m", "pip", "install", "-q", f"{wheel}[cpu]"], check=True, env=alone, timeout=1200)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [python, "-m", "nfdt.cli", "run", "--workers", "1", "train.py"],
        cwd=tmp_path,
        env=alone,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"python{version}" in done.stdout
    assert done.stdout.endswith(" ['worker-0']\n")
