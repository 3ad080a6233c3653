"""``history.nfdt``: a mapping of workers that also knows the place of the fit by name."""

from nfdt_client.fit_record import FitRecord


def test_place_and_reason_are_found_by_name_and_are_no_workers():
    record = FitRecord({"worker-0": {"steps": 3}}, where="local", reason="no module")
    assert record["where"] == record.get("where") == record.where == "local"
    assert record["reason"] == record.get("reason") == "no module"
    assert record.get("worker-0") == {"steps": 3}
    assert (record.get("worker-1"), record.get("worker-1", {})) == (None, {})
    assert list(record) == ["worker-0"]
