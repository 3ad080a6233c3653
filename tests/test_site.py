"""Site of the documentation: it builds without a warning, is complete, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfdt
import nfdt
from nfdt.cli import HFDT_SUMMARIES, SUMMARIES
from nfdt.core.specs.presets import PRESETS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240
LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?'?((?:https?:)?//[^"' >]*)""")
LINKED = re.compile(r"""<link\b[^>]*\bhref="?'?((?:https?:)?//[^"' >]*)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_every_page_is_in_the_site(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.with_name("index.html") if path.stem == "README" else path for path in pages}
    assert [str(path) for path in sorted(pages) if not (site / path).exists()] == []
    assert "unmodified Keras 3 script" in (site / "index.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_another_host(site):
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    found = {str(path.relative_to(site)): LOADED.findall(text) + LINKED.findall(text) for path, text in texts.items()}
    assert {path: addresses for path, addresses in found.items() if addresses} == {}
    assert not any("@import url(http" in path.read_text(encoding="utf-8") for path in site.rglob("*.css"))


def test_the_reference_of_commands_has_all_of_them(site):
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    names = [f"nfdt {name}" for name in SUMMARIES] + [f"hfdt {name}" for name in HFDT_SUMMARIES]
    assert [name for name in names if f'id="{name.replace(" ", "-")}"' not in text] == []
    assert "--workers" in text
    assert "Sentinel" not in text


@pytest.mark.parametrize("package", [nfdt, hfdt], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(site, package):
    pages = ("nfdt", "hfdt")
    text = "".join((site / "reference" / f"{page}.html").read_text(encoding="utf-8") for page in pages)
    assert [name for name in package.__all__ if name not in text] == []


def test_the_reference_names_things_as_users_import_them(site):
    text = (site / "reference" / "nfdt.html").read_text(encoding="utf-8")
    titles = [re.sub("<[^>]*>", "", title) for title in re.findall(r"<h2\b.*?</h2>", text, re.DOTALL)]
    names = [title.strip().removesuffix("&para;").removesuffix("¶").strip() for title in titles]
    assert [name for name in nfdt.__all__ if f"nfdt.{name}" not in names] == []
    assert [name for name in names if "nfdt_client" in name] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_formulas_are_shown_without_a_script(site, preset):
    text = (site / "algorithms" / f"{preset}.html").read_text(encoding="utf-8")
    formulas = re.findall(r"<math.*?</math>", text, re.DOTALL)
    assert formulas
    assert [formula for formula in formulas if "\\" in re.sub("<[^>]*>", "", formula)] == []  # no LaTeX is left
