import json

import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.messages import to_report


def summary(value):
    return to_report(pb.NextRequest(worker="worker-0", summary_json=json.dumps(value))).summary


def test_a_summary_holds_numbers_and_nested_lists_of_them():
    found = summary({"logs": {"loss": 1, "f1": [0.5, [2, 3]]}, "val_logs": {"f1": []}})
    assert (found.logs, found.val_logs) == ({"loss": 1.0, "f1": [0.5, [2.0, 3.0]]}, {"f1": []})
    assert summary({"logs": {}}).val_logs is None


@pytest.mark.parametrize("value", ["much", [1.0, "much"], {"nested": 1.0}, [[None]], None])
def test_a_summary_of_anything_else_is_refused(value):
    with pytest.raises(ProtocolError, match="number or list"):
        summary({"logs": {"loss": value}})
