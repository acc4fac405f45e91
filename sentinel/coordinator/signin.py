"""Signing in with a browser: a form that takes the token, and the cookie that stands for it afterwards.

Owns the form and its answer. Who needs it is decided in ``access.py``.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from sentinel import __version__
from sentinel.coordinator.sessions import COOKIE, MAX_FORM_BYTES, Sessions, cookie_header
from sentinel.coordinator.views import POLICY, environment

PATH = "/sign-in"


class SignIn:
    """``token`` is what the form must be given."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._sessions = Sessions()
        self._template = environment().get_template("sign_in.html")

    def has_session(self, request: Request) -> bool:
        """True if this browser has signed in."""
        return request.cookies.get(COOKIE) in self._sessions

    def form(self, status: int = 401, problem: str = "") -> Response:
        """The page with the form."""
        body = self._template.render(version=__version__, problem=problem)
        return HTMLResponse(body, status, headers={"Content-Security-Policy": POLICY, "WWW-Authenticate": "Bearer"})

    async def submit(self, request: Request) -> Response:
        """Open a session for the right token; only a form of ours may ask (a browser says where a form came from)."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return self.form(403, "This form was sent from another site.")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return self.form(413, "This is too long for a token.")
        [given] = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[:1]
        if not hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode()):
            return self.form(401, "That is not the token of this coordinator.")
        answer = RedirectResponse("/", 303)
        answer.headers["Set-Cookie"] = cookie_header(self._sessions.open(), request.url.scheme == "https")
        return answer
