"""Python processes that find torch imported: a server that has imported it forks one for each that is asked for.

For many short trainings, most of whose time would go into importing torch. ``Warm().python`` is an executable to use in place of
the interpreter (torchrun takes it from PYTHON_EXEC). What is started so is a process of its own, with its own environment,
directory, streams, session and ``sitecustomize``; killing the executable kills it, and its end, code or signal, is passed on.
Owns no choice of who runs so. One thread each: the server's threads are those its OMP_NUM_THREADS gave it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "numpy",
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",  # any optimizer's constructor imports it
)
START_SECONDS = 60.0
_SHIM = """#!{python} -SE
import json, os, signal, socket, struct, sys
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [struct.pack("!I", len(asked))], [0, 1, 2])
server.sendall(asked)
(pid,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
for number in FORWARDED:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
(code,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Warm:
    """A server and its executable, ``python``; end it with ``close``. Raises OSError if the server does not come up."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        address = str(self._folder / "socket")
        self.python = self._folder / "python"
        self.python.write_text(_SHIM.format(python=sys.executable, address=address))
        self.python.chmod(0o700)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen([sys.executable, __file__, address], env=env)
        until = time.monotonic() + START_SECONDS
        while not Path(address).exists():
            if self._server.poll() is not None or time.monotonic() > until:
                self.close()
                raise OSError("the process that imports torch for others did not come up")
            time.sleep(0.02)

    def close(self) -> None:
        """End the server. Processes it has forked go on."""
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(address: str) -> NoReturn:
    """Import torch, then fork a process for each connection."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked safely"
    gc.freeze()  # else the first collection of every child would copy all this memory
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    Path(f"{address}.new").rename(address)  # only now may anybody connect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children are nobody's to wait for
    while True:
        caller, _ = listening.accept()
        if os.fork() == 0:
            break
        caller.close()
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(caller, 4, 3)
    words, env, folder = json.loads(caller.recv(*struct.unpack("!I", size), socket.MSG_WAITALL))
    pid = os.fork()
    if pid != 0:
        for one in streams:
            os.close(one)
        _stand_by(pid, caller)
    caller.close()
    _become(streams, env, folder)
    _end(_exit_code(words))


def _stand_by(pid: int, caller: socket.socket) -> None:
    """Tell the executable whose process this is, and its end; if the executable is killed, so is the process."""
    ended = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the executable is gone
        caller.sendall(struct.pack("!i", pid))
    ready, _, _ = select.select([ended, caller], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        caller.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(streams: list[int], env: dict[str, str], folder: str) -> None:
    """Take on the caller's streams, environment and directory, in a session of its own."""
    os.setsid()
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:1] = entries  # the first was this file's folder
    site = next((found for entry in entries if (found := Path(entry, "sitecustomize.py")).is_file()), None)
    if site is not None:
        spec = importlib.util.spec_from_file_location("sitecustomize", site)
        assert spec
        assert spec.loader
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_held: list[BaseException] = []
"""What ended the program, with its frames: letting go of a process group here, at once and with the GIL, can wait for ever for a
thread of gloo's that wants the GIL to let go of its own part."""


def _exit_code(words: list[str]) -> int:
    """Run the program; what the interpreter would exit with."""
    try:
        _run(words)
    except SystemExit as end:
        _held.append(end)
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        _held.append(error)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but leave out taking apart all of torch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(words: list[str]) -> None:
    """``[-u] SCRIPT …`` or ``[-u] -m MODULE …``, as the interpreter would run it: in ``__main__``."""
    if words[0] == "-u":
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = words[0]
    sys.argv = words
    sys.path.insert(0, str(Path(script).resolve().parent))
    spec = importlib.util.spec_from_file_location("__main__", script)
    assert spec
    assert spec.loader
    main = sys.modules["__main__"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)


if __name__ == "__main__":
    serve(sys.argv[1])
