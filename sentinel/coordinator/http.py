"""Serving the pages on a thread of their own, away from the loop.

Owns the listening socket and the server's life. What is answered is in ``pages.py``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

import uvicorn
from starlette.types import ASGIApp

from sentinel.coordinator.config import join_host_port, split_host_port

log = logging.getLogger(__name__)

START_SECONDS = 10.0


class HttpUnavailable(RuntimeError):
    """The pages cannot be served; the text says where and why, in one line."""


class HttpServer:
    """One uvicorn on one thread. ``bind``, then ``start``."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def bind(self) -> str:
        """Listen, and return host:port with the real port. Raises HttpUnavailable."""
        host, port = split_host_port(self._bind)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self.close()
            raise HttpUnavailable(f"cannot listen on {self._bind}: {error.strerror or error}") from error
        return join_host_port(host, self._socket.getsockname()[1])

    def start(self, app: ASGIApp) -> None:
        """Serve ``app``; returns once requests are answered. Raises HttpUnavailable."""
        assert self._socket is not None
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=256,
        )
        self._server = uvicorn.Server(config)
        sockets = [self._socket]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": sockets}, name="sentinel-http", daemon=True
        )
        self._thread.start()
        self._await_start()

    def _await_start(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HttpUnavailable(f"the pages on {self._bind} did not start")
            time.sleep(0.005)

    def stop(self, timeout: float) -> bool:
        """Finish running requests and close. False if ``timeout`` seconds were not enough."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout)
        self.close()
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
