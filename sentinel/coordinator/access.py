"""Who may read the pages, and what browsers may do with them: token, Host check, security headers.

Owns the middleware around every request, and the pages' one broad ``except``. Pages are read-only, so any method but GET and
HEAD is refused here; only the sign-in form may be posted, and what acts, with a token in its header: a browser that has signed in
holds a cookie, which never suffices, so no page elsewhere can make it act.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Container, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel.coordinator.signin import PATH, SignIn

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz"})
ACTING = re.compile(r"/api/v1/(incidents/[^/]+/ack|dump)")
OPEN_FOLDER = "/static/"  # what the sign-in page is made of
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Access:
    """ASGI middleware. ``hosts`` are the Host names answered to, None for any; ``token`` is asked for unless None;
    ``count_fault`` is called once for each request that failed by a fault of ours; ``acting`` are the tokens that let one act.

    Without a token the Host check keeps a web page elsewhere from reading these pages through a name of its own that
    resolves to 127.0.0.1.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        hosts: Container[str] | None,
        count_fault: Callable[[], None],
        acting: Sequence[str] = (),
    ) -> None:
        self._acting = tuple(acting)
        self._app = app
        self._count_fault = count_fault
        self._token = token
        self._hosts = hosts
        self._sign_in = SignIn(token) if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            answer = self._refusal(scope) or await self._signing_in(scope, receive) or self._app
            await answer(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 - the one for pages; counted, and the client is told
            self._count_fault()
            log.error("page %s failed: %s: %s", ascii(scope["path"])[:100], type(error).__name__, error)
            if not started:
                await _error(500, "fault", type(error).__name__)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] == "POST" and ACTING.fullmatch(scope["path"]):
            return self._unknown_host(headers) or self._may_not_act(headers)
        if scope["method"] not in ("GET", "HEAD") and not self._is_sign_in(scope):
            return _error(405, "method_not_allowed", "these pages can only be read", {"Allow": "GET, HEAD"})
        if refusal := self._unknown_host(headers):
            return refusal
        return None if self._is_open(scope["path"]) or self._is_sign_in(scope) else self._ask_for_token(scope, headers)

    def _unknown_host(self, headers: Headers) -> Response | None:
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return _error(421, "unknown_host", "this host name is not one of this coordinator's")
        return None

    def _may_not_act(self, headers: Headers) -> Response | None:
        if any(_carries(headers, token) for token in self._acting):
            return None
        return _error(401, "token_required", "acting needs Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def _is_open(self, path: str) -> bool:
        return self._token is None or path in OPEN_PATHS or path.startswith(OPEN_FOLDER)

    def _is_sign_in(self, scope: Scope) -> bool:
        return self._sign_in is not None and scope["path"] == PATH and scope["method"] in ("GET", "HEAD", "POST")

    def _ask_for_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self._sign_in is not None
        if self._has_token(headers) or self._sign_in.has_session(Request(scope)):
            return None
        if "text/html" in headers.get("accept", ""):
            return self._sign_in.form()
        return _error(401, "token_required", "send Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    async def _signing_in(self, scope: Scope, receive: Receive) -> Response | None:
        if self._sign_in is None or scope["path"] != PATH:
            return None
        return (
            await self._sign_in.submit(Request(scope, receive))
            if scope["method"] == "POST"
            else self._sign_in.form(200)
        )

    def _has_token(self, headers: Headers) -> bool:
        return any(_carries(headers, token) for token in (self._token or "", *self._acting) if token)


def _carries(headers: Headers, token: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _error(status: int, reason: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason, "detail": detail}, status_code=status, headers=headers)


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
