"""Links and cookies of the page."""

from __future__ import annotations

from nfdt.core.jobs.rights import Holder
from nfdt.web import sessions
from nfdt.web.sessions import LINK_S, SESSION_S, PageSessions

HOLDER = Holder("a-secret", "ada", "read")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_link_is_redeemed_once():
    found = PageSessions()
    link = found.make_link(HOLDER)
    cookie = found.redeem(link)
    assert found.holder(cookie) == HOLDER
    assert found.redeem(link) is None


def test_a_link_is_no_cookie_and_a_cookie_no_link():
    found = PageSessions()
    link = found.make_link(HOLDER)
    assert found.holder(link) is None
    assert found.redeem(found.redeem(link)) is None


def test_unknown_and_empty_keys_are_nobody():
    found = PageSessions()
    assert found.redeem("") is None
    assert found.holder("") is None
    assert found.holder("x" * 43) is None


def test_links_and_cookies_expire():
    clock = Clock()
    found = PageSessions(clock)
    late, link = found.make_link(HOLDER), found.make_link(HOLDER)
    cookie = found.redeem(link)
    clock.now = LINK_S
    assert found.redeem(late) is None
    assert found.holder(cookie) == HOLDER
    clock.now = SESSION_S
    assert found.holder(cookie) is None


def test_the_oldest_link_is_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(sessions, "MOST", 2)
    found = PageSessions()
    first, second, third = (found.make_link(HOLDER) for _ in range(3))
    assert found.redeem(first) is None
    assert found.redeem(second)
    assert found.redeem(third)
