"""``history.nfdt``: a mapping of workers that also knows the place of the fit by name."""

from nfdt_client.fit_record import FitRecord


def test_place_and_reason_are_found_by_name_and_are_no_workers():
    record = FitRecord({"worker-0": {"steps": 3}}, where="local", reason="no module")
    assert record["where"] == record.get("where") == record.where == "local"
    assert record["reason"] == record.get("reason") == "no module"
    assert record.get("worker-0") == {"steps": 3}
    assert (record.get("worker-1"), record.get("worker-1", {})) == (None, {})
    assert list(record) == ["worker-0"]


def test_the_record_of_two_jobs_has_the_counts_of_both_and_the_speeds_of_the_later_one():
    before = FitRecord({"worker-0": {"samples": 5, "staleness": {"0": 2, "3": 1}, "samples_per_s": 1.0}}, 7)
    later = {"samples": 4, "staleness": {"0": 1, "1": 1}, "samples_per_s": 8.0}
    both = before.followed_by(FitRecord({"worker-0": later, "worker-1": {"samples": 2}}))
    assert both["worker-0"] == {"samples": 9, "staleness": {"0": 3, "1": 1, "3": 1}, "samples_per_s": 8.0}
    assert (both["worker-1"], both.redone_samples, both.where) == ({"samples": 2}, 7, "cluster")
