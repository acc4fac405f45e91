"""What ``sentinel doctor`` looks at: one function per check, each returning what it saw and whether that will do.

Owns the checks. Torch is looked at in a child process, as commands never import it.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel

from sentinel.cli.version import installed_version

CHILD_SECONDS = 60.0
FILES_WANTED = 1024  # a relay's sockets for a node of 8 ranks need some tens; a coordinator one per node
IPC_PATH_LIMIT = 107  # sun_path of a Unix socket on Linux, less its final zero
_RELAY_SUFFIX = len("/sentinel-XXXXXXXX/relay-65535.ipc")

_PROBE = """
import json
try:
    import torch, torch.distributed as dist
    seen = {"torch": torch.__version__, "gloo": dist.is_available() and dist.is_gloo_available()}
    from sentinel.launch.injection import site_directory
    seen["site"] = str(site_directory())
except Exception as error:
    seen = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(seen))
"""
_INJECTED = """
import sys
hidden = getattr(sys.modules.get("sitecustomize"), "__file__", "")  # a distribution's own, which ours runs after itself
print(*getattr(sys, "_sentinel_sites", [])[:1] or [hidden])
"""


class Health(StrEnum):
    """ok: will do. warning: works, with less. failed: ``sentinel run`` cannot watch a job here."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class CheckResult(BaseModel):
    """One line of the doctor's report."""

    name: str
    health: Health
    seen: str
    hint: str = ""


def run_checks() -> list[CheckResult]:
    """Every check, in the order of the report. Takes a few seconds, most of them importing torch in a child."""
    probe = _probe_child()
    return [*(check() for check in _PLAIN), torch_check(probe), injection_check(probe)]


def python_check() -> CheckResult:
    """Python is one we support."""
    seen = f"{sys.version.split()[0]} at {sys.executable}"
    fits = sys.version_info >= (3, 11)
    return _result("python", fits, seen, "Python 3.11 or newer is needed")


def curve_check() -> CheckResult:
    """ZeroMQ can encrypt: without CURVE nothing connects, as there is no plain path."""
    import zmq

    seen = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    return _result(
        "zeromq curve", zmq.has("curve"), seen, "this pyzmq has no CURVE: pip install --force-reinstall pyzmq"
    )


def packages_check() -> CheckResult:
    """The packages that messages and records are made of are there."""
    names = ("msgspec", "pydantic", "safetensors", "prometheus-client", "starlette", "uvicorn")
    found = {name: installed_version(name) for name in names}
    missing = [name for name, seen in found.items() if seen is None]
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    return _result("packages", not missing, seen, f"pip install {' '.join(missing)}")


def files_check() -> CheckResult:
    """Enough open files are allowed for one connection per node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    return _result("open files", fits, f"soft {soft}, hard {hard}", f"ulimit -Hn {FILES_WANTED}", Health.WARNING)


def ipc_check() -> CheckResult:
    """The path of the relay's socket fits into what the kernel takes."""
    folder = tempfile.gettempdir()
    length = len(folder) + _RELAY_SUFFIX
    return _result(
        "ipc path",
        length <= IPC_PATH_LIMIT,
        f"{length} of {IPC_PATH_LIMIT} bytes below {folder}",
        "set TMPDIR to a shorter path",
    )


def ports_check() -> CheckResult:
    """A loopback port can be bound."""
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            return _result("loopback port", True, f"bound {listening.getsockname()[1]}", "")
    except OSError as error:
        return _result("loopback port", False, str(error), "the sandbox or firewall forbids listening on 127.0.0.1")


def torch_check(probe: dict[str, object]) -> CheckResult:
    """Torch imports and has a distributed backend."""
    if "error" in probe:
        return _result("torch", False, str(probe["error"]), "pip install torch into this environment")
    fits = bool(probe["gloo"])
    return _result(
        "torch",
        fits,
        f"torch {probe['torch']}, gloo {'available' if fits else 'absent'}",
        "this torch has no gloo",
        Health.WARNING,
    )


def injection_check(probe: dict[str, object]) -> CheckResult:
    """A child started with our PYTHONPATH runs our sitecustomize: that is how scripts are watched unchanged."""
    hint = "python -I, -S or -E would switch it off; sentinel_agent.attach() in the script works without it"
    if "site" not in probe:
        return _result("injection", False, "not tried, as torch or the agent does not import", hint)
    site = Path(str(probe["site"]))
    ran = _child(_INJECTED, {"PYTHONPATH": str(site)})
    fits = bool(ran) and Path(ran) == site
    return _result(
        "injection", fits, "a child process loads the agent" if fits else f"the child loaded {ran or 'nothing'}", hint
    )


_PLAIN: tuple[Callable[[], CheckResult], ...] = (
    python_check,
    curve_check,
    packages_check,
    files_check,
    ipc_check,
    ports_check,
)


def _result(name: str, fits: bool, seen: str, hint: str, otherwise: Health = Health.FAILED) -> CheckResult:
    return CheckResult(name=name, health=Health.OK if fits else otherwise, seen=seen, hint="" if fits else hint)


def _probe_child() -> dict[str, object]:
    answer = _child(_PROBE, {})
    try:
        seen = json.loads(answer)
    except ValueError:
        return {"error": f"the child process said {answer[:80]!r}"}
    return seen if isinstance(seen, dict) else {"error": "the child process answered nonsense"}


def _child(program: str, variables: dict[str, str]) -> str:
    """Last line that a Python child prints; its complaint if it cannot run."""
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-c", program]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (ran.stdout or ran.stderr).strip().splitlines()
    return lines[-1] if lines else ""
