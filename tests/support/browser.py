"""Client of a job server's page that keeps its cookie, as a browser does."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from typing import Any

TIMEOUT_S = 120


class Browser:
    """Requests to a page; an answer with an error status is returned, not raised.

    Args:
        url: Address of the page, without a key.
        token: Token that is sent instead of a cookie; "": none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}
        self.cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def request(self, path: str, *, post: bool = False, **headers: str) -> http.client.HTTPResponse | Any:
        target = path if path.startswith("http") else self.url + path
        request = urllib.request.Request(target, headers={**self._headers, **headers}, method="POST" if post else "GET")
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            return error

    def status(self, path: str, **options: Any) -> int:
        with self.request(path, **options) as answer:
            return int(answer.status)

    def json(self, path: str) -> Any:
        with self.request(path) as answer:
            assert answer.status == 200, answer.read()
            return json.load(answer)

    def messages(self, job_id: str, after: int | str = 0) -> Iterator[tuple[str, Any]]:
        """Yield name and value of the messages of a job's stream, until it ends."""
        with self.request(f"api/jobs/{job_id}/stream?after={after}") as answer:
            assert answer.status == 200, answer.read()
            name = ""
            for line in map(bytes.decode, answer):
                field, _, value = line.strip().partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
                    if name == "end":
                        return

    def events(self, job_id: str, after: int | str = 0) -> list[dict[str, Any]]:
        """Return all events of a job that has ended, or ends now."""
        return [event for name, value in self.messages(job_id, after) if name == "events" for event in value]
