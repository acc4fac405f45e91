"""Server-sent events: telling open pages that there is something new, so that none of them polls.

Owns the stream and its bound. What is new, pages fetch themselves; an event only names the runs that changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0
MAX_STREAMS = 64

Versions = Callable[[], Mapping[str, str] | None]
"""A token per run that changes with everything a page could show; None if the loop does not answer."""


class ChangeStream:
    """``/api/v1/events``. One question to the loop per half second, however many pages are open."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._open = 0
        self._known: Mapping[str, str] = {}
        self._asked_at = -POLL_SECONDS

    async def answer(self, request: Request) -> Response:
        """One page's stream; it ends when the page goes away or the coordinator stops."""
        if self._open >= MAX_STREAMS:
            return JSONResponse({"error": "too_many_streams", "detail": f"at most {MAX_STREAMS}"}, status_code=503)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _events(self) -> AsyncIterator[str]:
        self._open += 1
        try:
            yield "retry: 1000\n\n"
            told: Mapping[str, str] = {}
            quiet_since = asyncio.get_running_loop().time()
            while True:
                known = await self._newest()
                changed = [run for run, version in known.items() if told.get(run) != version]
                now = asyncio.get_running_loop().time()
                if changed or known.keys() != told.keys():
                    yield f"event: change\ndata: {json.dumps({'runs': changed})}\n\n"
                    told, quiet_since = known, now
                elif now - quiet_since > KEEPALIVE_SECONDS:
                    yield ": still here\n\n"
                    quiet_since = now
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._open -= 1

    async def _newest(self) -> Mapping[str, str]:
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= POLL_SECONDS:
            self._asked_at = now
            known = await run_in_threadpool(self._versions)
            self._known = self._known if known is None else known
        return self._known
