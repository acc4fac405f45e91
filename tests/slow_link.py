"""A slow network link between two processes of this machine: a TCP proxy with a bandwidth."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

CHUNK = 2048


class SlowLink:
    """Passes connections to ``127.0.0.1:port`` on at ``bits`` per second in each direction; ``own`` is its port."""

    def __init__(self, port: int, bits: float) -> None:
        self._port = port
        self._bytes_per_second = bits / 8
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.own: int = self._listener.getsockname()[1]
        self.carried = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break the connections there are; new ones are carried again."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut everything."""
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for one in (near, far):  # a slow link's buffers are small: what is sent is not yet gone
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * CHUNK)
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(CHUNK):
                time.sleep(len(piece) / self._bytes_per_second)  # the link's speed, not a wait for anything
                sink.sendall(piece)
                self.carried += len(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
