"""Routes of the page: the page itself, jobs as JSON, their events as a stream, actions, and metrics."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from nfdt.core.errors import AuthenticationFailed, NfdtError, PolicyRefused, UsageError
from nfdt.core.events import Event, EventKind
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import JobRecord, is_terminal
from nfdt.core.jobs.rights import AuditLog, Holder, Holders
from nfdt.core.jobs.runner import JobRunner
from nfdt.core.jobs.service import seen_slots
from nfdt.core.jobs.store import JobStore, unknown_job
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.web.job_page import describe_epochs, describe_job, describe_program, weights_file
from nfdt.web.json_answer import JsonAnswer, dump_json
from nfdt.web.machines import describe_machines
from nfdt.web.metrics import render_metrics
from nfdt.web.series import FIELDS, WorkerSeries
from nfdt.web.sessions import SESSION_S, PageSessions

STATIC = Path(__file__).with_name("static")
PIECE_BYTES = 2**20  # of a file that is sent
POLL_S = 0.5  # interval at which a stream looks for new events
CURSOR_DIGITS = 18  # cursors are integers of 64 bits
BATCH = 1000  # events in one message of a stream
EPOCHS = 2000  # ends of epochs, and validations after them, that are read at a time
ALERTS = 20  # of a job, the latest, on the list of jobs
EPOCH_KINDS: tuple[EventKind, ...] = ("epoch_end", "validated")
PARSED = 2000  # specifications of jobs that are kept parsed, as the list of jobs is read every few seconds
QUIET_S = 15.0  # a stream without news sends a sign of life, so that proxies keep it open
_BEARER = "Bearer "
_JOBS = "/nfdt.v1.Jobs/"
_POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",
    "style-src 'self' 'unsafe-inline'",  # charts set sizes of their elements
    "frame-ancestors 'none'",
)
_SAFE = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_CLOSED = (
    "<!doctype html><title>NFDT</title><p>This page opens with a link that holds a key, once. "
    "<code>nfdt ui</code> prints a new one.</p>"
)


@dataclass(frozen=True)
class PageSource:
    """Parts of a job server that the page shows.

    Attributes:
        store: Jobs and events.
        artifacts: Files of the jobs.
        runner: Runner of the jobs.
        holders: Holders of the server's tokens.
        audit: Log of the users' actions.
    """

    store: JobStore
    artifacts: ArtifactStore
    runner: JobRunner
    holders: Holders
    audit: AuditLog


class Pages:
    """Request handlers. Each finds the holder of the cookie or the token that came with its request.

    Handlers that are no coroutines may block: Starlette calls them on threads.

    Args:
        source: Parts of the server.
        sessions: Links and cookies.
        series: Recent numbers of the workers.
        cookie: Name of the cookie. Browsers do not separate cookies by port, so each port needs its own name.
        secure: Whether the page is served over TLS.
        admit: Called with the address of a connection on which a valid token or cookie has arrived.
    """

    def __init__(
        self,
        source: PageSource,
        sessions: PageSessions,
        series: WorkerSeries,
        *,
        cookie: str,
        secure: bool,
        admit: Callable[[str, int], None],
    ) -> None:
        self._source, self._sessions, self._series = source, sessions, series
        self._cookie, self._secure, self._admit = cookie, secure, admit
        self._parse = functools.lru_cache(maxsize=PARSED)(parse_job)

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._page),
            Route("/jobs/{job_id}", self._page),
            Route("/machines", self._page),
            Route("/open", self._open),
            Route("/metrics", self._metrics),
            Route("/api/jobs", self._list),
            Route("/api/jobs/{job_id}", self._show),
            Route("/api/machines", self._machines),
            Route("/api/jobs/{job_id}/epochs", self._epochs),
            Route("/api/jobs/{job_id}/alerts", self._alerts),
            Route("/api/jobs/{job_id}/stream", self._stream),
            Route("/api/jobs/{job_id}/weights.npz", self._weights),
            Route("/api/jobs/{job_id}/stacks", self._stacks, methods=["POST"]),
            Route("/api/jobs/{job_id}/{action:str}", self._act, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        middleware = [Middleware(BaseHTTPMiddleware, dispatch=_add_headers)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers={NfdtError: _answer_error})

    # ---- rights

    def _find_holder(self, request: Request) -> Holder | None:
        authorization = request.headers.get("authorization", "")
        if authorization.startswith(_BEARER):
            holder = self._source.holders.find(authorization.removeprefix(_BEARER))
        else:
            holder = self._sessions.holder(request.cookies.get(self._cookie, ""))
        if holder is not None and request.client:
            self._admit(*request.client)
        return holder

    def _holder(self, request: Request, method: str) -> Holder:
        """Return the holder of the request's cookie or token.

        Raises:
            AuthenticationFailed: there is none.
            PolicyRefused: the holder's role does not include this method of the Jobs service.
        """
        holder = self._find_holder(request)
        if holder is None:
            raise AuthenticationFailed("Expected a cookie of this page, or a token of the server. Received: neither.")
        holder.check_call(_JOBS + method)
        return holder

    def _record(self, request: Request, method: str) -> JobRecord:
        holder, job_id = self._holder(request, method), request.path_params["job_id"]
        record = self._source.store.get(job_id)
        if not holder.sees(record.owner):
            raise unknown_job(job_id)
        return record

    # ---- the page

    def _open(self, request: Request) -> Response:
        """Exchange a link for a cookie."""
        cookie = self._sessions.redeem(request.query_params.get("key", ""))
        if cookie is None:
            return HTMLResponse(_CLOSED, 401)
        job_id = request.query_params.get("job", "")
        to = f"/jobs/{job_id}" if job_id.replace("-", "").isalnum() else "/"
        answer = RedirectResponse(to, 303)
        lasts_s = int(SESSION_S)
        answer.set_cookie(self._cookie, cookie, max_age=lasts_s, httponly=True, samesite="strict", secure=self._secure)
        return answer

    def _page(self, request: Request) -> Response:
        if self._find_holder(request) is None:
            return HTMLResponse(_CLOSED, 401)
        return HTMLResponse((STATIC / "index.html").read_text(encoding="utf-8"))

    # ---- jobs

    def _list(self, request: Request) -> Response:
        holder, places = self._holder(request, "List"), self._source.runner.places()
        seen = [record for record in self._source.store.jobs() if holder.sees(record.owner)]
        return JsonAnswer([describe_job(record, self._parse(record.spec_json), places) for record in seen])

    def _show(self, request: Request) -> Response:
        record = self._record(request, "Show")
        may_act = self._holder(request, "Show").may_call(f"{_JOBS}Control")
        program = describe_program(record, self._source.artifacts)
        job = describe_job(record, self._parse(record.spec_json), self._source.runner.places())
        return JsonAnswer({**job, **program, "may_act": may_act, "fields": FIELDS})

    def _epochs(self, request: Request) -> Response:
        record = self._record(request, "Watch")
        return JsonAnswer(describe_epochs(record, self._source.store.latest(record.job_id, EPOCH_KINDS, EPOCHS)))

    def _alerts(self, request: Request) -> Response:
        record = self._record(request, "Watch")
        return JsonAnswer([_plain(event) for event in self._source.store.alerts(record.job_id, ALERTS)])

    def _machines(self, request: Request) -> Response:
        slots = seen_slots(self._source.store, self._source.runner, self._holder(request, "Slots"))
        return JsonAnswer(describe_machines(slots))

    async def _stream(self, request: Request) -> Response:
        record = self._record(request, "Watch")
        after = request.headers.get("last-event-id") or request.query_params.get("after", "0")
        cursor = int(after) if after.isdecimal() and len(after) <= CURSOR_DIGITS else 0
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._messages(record.job_id, cursor), headers=headers, media_type="text/event-stream")

    async def _messages(self, job_id: str, cursor: int) -> AsyncIterator[str]:
        """Yield the events of a job after a cursor and the points of its workers, until the job has ended."""
        at, quiet_s, ended = 0.0, 0.0, False
        while True:
            events = await asyncio.to_thread(self._source.store.events, job_id, cursor, BATCH)
            points = self._series.after(job_id, at)
            if events:
                cursor = events[-1].cursor
                yield _message("events", list(map(_plain, events)), cursor)
            if points:
                at = points[-1].at
                yield _message("points", [point.to_json() for point in points])
            if events or points:
                quiet_s = 0.0
            elif ended:
                yield _message("end", {})
                return
            else:
                if quiet_s >= QUIET_S:
                    yield ": still here\n\n"
                    quiet_s = 0.0
                await asyncio.sleep(POLL_S)
                quiet_s += POLL_S
            ended = is_terminal(self._source.store.get(job_id).state)

    def _weights(self, request: Request) -> Response:
        record = self._record(request, "Download")
        state = self._source.runner.snapshot(record.job_id, pb.SnapshotRequest.WEIGHTS).artifact
        file = weights_file(record, self._source.artifacts, state)
        headers = {"Content-Disposition": f'attachment; filename="{record.job_id}.npz"'}
        pieces = iter(functools.partial(file.read, PIECE_BYTES), b"")
        return StreamingResponse(pieces, headers=headers, media_type="application/zip")

    def _act(self, request: Request) -> Response:
        """Stop a job after the work under way, or cancel it."""
        actions: dict[str, dict[str, Any]] = {
            "stop": {"stop_training": pb.StopTraining()},
            "cancel": {"cancel": pb.Cancel(reason="on the page")},
        }
        if (name := request.path_params["action"]) not in actions:
            raise UsageError(f"Action: expected {' or '.join(actions)}. Received: {name}.")
        record = self._acting(request, name)
        self._source.runner.control(pb.ControlRequest(job_id=record.job_id, **actions[name]))
        return JsonAnswer({})

    def _stacks(self, request: Request) -> Response:
        """Return where the threads of a process of a job are."""
        record, query = self._acting(request, "stacks"), request.query_params
        pid = query.get("pid", "")
        if not (pid.isdecimal() and len(pid) <= CURSOR_DIGITS):
            raise UsageError(f"Stacks: expected host and pid of a process. Received: {pid!r}.")
        return PlainTextResponse(self._source.runner.stacks(record.job_id, query.get("host", ""), int(pid)))

    def _acting(self, request: Request, action: str) -> JobRecord:
        """Return the job on which the caller acts, and write that to the audit log.

        Raises:
            UsageError: there is no such job, or the request lacks the header that other sites cannot send.
            PolicyRefused: the caller may not.
        """
        if "x-nfdt" not in request.headers:
            raise UsageError(f"{action}: expected the header X-NFDT. Received: none.")
        record, holder = self._record(request, "Control"), self._holder(request, "Control")
        peer = f"{request.client.host}:{request.client.port}" if request.client else ""
        self._source.audit.write(action, holder, peer, record.job_id)
        return record

    def _metrics(self, request: Request) -> Response:
        text, kind = render_metrics(self._source.store, self._source.runner, self._holder(request, "List"))
        return Response(text, media_type=kind)


def _plain(event: Event) -> dict[str, Any]:
    return {"cursor": event.cursor, "at": event.at, "kind": event.kind, "data": event.data}


def _message(name: str, value: Any, cursor: int | None = None) -> str:
    number = f"id: {cursor}\n" if cursor is not None else ""
    return f"event: {name}\n{number}data: {dump_json(value)}\n\n"


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer an error of NFDT with its text."""
    match error:
        case AuthenticationFailed():
            status = 401
        case PolicyRefused():
            status = 403
        case UsageError():
            status = 404 if "No job" in str(error) else 400
        case _:
            status = 503
    return PlainTextResponse(str(error), status)


async def _add_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    answer = await call(request)
    for name, value in _SAFE.items():
        answer.headers.setdefault(name, value)
    return answer
