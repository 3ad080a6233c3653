"""Options of groups."""

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.specs.algorithm import explicit_groups, wanted_groups
from nfdt.core.specs.job import check_groups, resolve_algorithm, resolve_cluster


@pytest.mark.parametrize(
    ("text", "members", "wanted"),
    [
        ("auto", None, None),
        ("2", None, 2),
        ("1", ((0, 1, 2, 3),), 1),
        ("0,1;2,3", ((0, 1), (2, 3)), None),
        ("3,0;2;1", ((0, 3), (2,), (1,)), None),
    ],
)
def test_groups_are_named_or_counted_or_found(text, members, wanted):
    assert explicit_groups(text, 4) == members
    assert wanted_groups(text) == wanted


@pytest.mark.parametrize("text", ["0,1;2", "0,1;2,4", "0,1;1,2,3", "0", "5"])
def test_groups_have_each_worker_once(text):
    with pytest.raises(UsageError, match="groups: expected"):
        check_groups(resolve_algorithm("group-sync", groups=text), resolve_cluster(workers=4))


@pytest.mark.parametrize("options", [{"hosts": "a:4"}, {"hostfile": "f"}, {"min_workers": 2}])
def test_groups_are_started_by_the_server_on_its_machine(options):
    with pytest.raises(UsageError, match="its own machine"):
        check_groups(resolve_algorithm("group-sync"), resolve_cluster(workers=4, **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": "0,1"}, "groups"),
        ({"groups": True}, "groups"),
        ({"overlap": 1}, "overlap"),
        ({"consistency": "softsync"}, "consistency"),
        ({"local_steps": 0}, "local_steps"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        resolve_algorithm("group-sync", **options)


def test_a_number_of_groups_may_be_a_number():
    assert resolve_algorithm("group-sync", groups=2).groups == "2"


@pytest.mark.parametrize("value", ["delta", "gradient"])
def test_the_removed_differences_of_groups_name_what_to_use(value):
    with pytest.raises(UsageError, match=r"outer: .*algorithm='local-ddc'.*local_steps"):
        resolve_algorithm("group-sync", outer=value)


def test_groups_exchange_every_step():
    with pytest.raises(UsageError, match="exchange: expected 'every-step'"):
        resolve_algorithm("group-sync", exchange="local-steps")
