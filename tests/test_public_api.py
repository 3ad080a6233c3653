"""Public names of the packages, which import nothing until they are used."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

import nfdt
from nfdt.core import errors

PUBLIC = ["Embedding", "JobHandle", "LocalCluster", "attach", "distribute", "errors"]
PUBLIC += ["load_tables", "save_tables", "session", "submit"]


def test_the_public_names_are_these():
    assert dir(nfdt) == PUBLIC
    assert sorted(nfdt.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name):
    assert inspect.getdoc(getattr(nfdt, name))


def test_an_unknown_name_is_an_attribute_error_that_names_the_valid_ones():
    with pytest.raises(AttributeError, match="distribute"):
        nfdt.distributed  # noqa: B018


def test_the_version_is_the_installed_one():
    assert nfdt.__version__ == importlib.metadata.version("nfdt")


@pytest.mark.parametrize("parameter", ["workers", "algorithm", "server", "options"])
def test_distribute_takes_the_documented_arguments_by_name(parameter):
    assert inspect.signature(nfdt.distribute).parameters[parameter].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    "error", [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.NfdtError)]
)
def test_every_error_has_an_exit_code_of_the_table(error):
    assert error.exit_code in (1, 2, 3, 4, 5, 6)
    assert issubclass(error, errors.NfdtError)
