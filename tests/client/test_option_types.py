"""Types of the options: the same names and values as the options themselves."""

from __future__ import annotations

import inspect
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from nfdt_client import decorator
from nfdt_client.option_types import EmulateOptions, FitOptions
from nfdt_client.options import NAMES

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.emulation import Emulation
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.specs.presets import AXES

PARAMETERS = set(inspect.signature(decorator.session).parameters) - {"options", "default_algorithm", "overrides"}
MODELS = {**AlgorithmSpec.model_fields, **ClusterSpec.model_fields}
TYPES = get_type_hints(FitOptions)


def values_of(annotation: Any) -> set[Any]:
    """Return the types and literals of an annotation, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(values_of, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {annotation} - {type(None)}


def test_every_option_has_a_type_or_a_parameter():
    names = {name for name in NAMES if not name.startswith("emulate.")} | {"emulate"}
    assert set(TYPES) == names - PARAMETERS


def test_emulation_has_the_same_fields():
    assert set(get_type_hints(EmulateOptions)) == set(Emulation.model_fields)


@pytest.mark.parametrize("name", [name for name in MODELS if name in TYPES and name not in (*AXES, "emulate")])
def test_options_have_the_types_of_their_fields(name):
    allowed = values_of(MODELS[name].annotation)
    if name == "groups":
        allowed |= {int}  # a number of groups
    if name == "reply_codec":
        allowed = {one for one in AXES["codec"] if one != "adaptive"}
    assert values_of(TYPES[name]) == allowed


@pytest.mark.parametrize("axis", AXES)
def test_axes_have_the_types_of_their_choices(axis):
    assert values_of(TYPES[axis]) == set(AXES[axis])


@pytest.mark.parametrize("entrance", [decorator.distribute, decorator.session, decorator.submit])
def test_entrances_take_them(entrance):
    assert "FitOptions" in str(inspect.signature(entrance).parameters["overrides"].annotation)
