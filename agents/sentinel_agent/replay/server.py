"""A replay as a process: request in by standard input, progress and record out by standard output, one JSON object a line each.

Owns this protocol and the choice of the rank; who asked keeps the record. Torch is imported here once; trials are forked.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.replayed import ReplayRecord, ReplayRequest
from sentinel_agent.replay.investigation import Investigation

_PRELOADED_AT_MOST: Final = 32
_LATE: Final = ("torch._dynamo", "torch.nn.parallel", "torch.testing._internal.distributed.fake_pg", "numpy.random")
_IMPORT_ERRORS: Final = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError)


class Refused(ValueError):
    """A replay that cannot begin; the text says why in one line."""


def serve() -> int:
    """Answer the request on standard input; returns the exit code."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the trial that runs is ended, too
    try:
        request = ReplayRequest.model_validate_json(sys.stdin.readline())
        threading.Thread(target=_end_with_who_asked, daemon=True).start()
        record = _replay(request)
    except (Refused, BundleRefused) as error:
        _say(error=str(error))
        return 1
    except ValidationError as error:
        _say(error=f"not a request: {error.errors()[0]['msg']}")
        return 2
    print(json.dumps({"record": json.loads(record.model_dump_json())}), flush=True)
    return 0


def _end_with_who_asked() -> None:
    """Standard input stays open as long as somebody waits for the record; nobody does once it ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _replay(request: ReplayRequest) -> ReplayRecord:
    bundle = Bundle.open(request.bundle)
    rank = choose_rank(bundle) if request.rank is None else request.rank
    header = bundle.part(rank).header
    script = Path(header.environment.cwd, request.script or header.environment.argv[0])
    if header.environment.module is None and not script.is_file():
        raise Refused(f"the script {script} is not here")
    _preload(script)
    scratch = Path(tempfile.mkdtemp(prefix="sentinel-replay-"))
    try:
        return Investigation(bundle, rank, request, scratch, lambda words: _say(progress=words)).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def choose_rank(bundle: Bundle) -> int:
    """The rank whose own gradients or loss were nonfinite, else the first that wrote before the step, else the first."""
    parts = [part for _, part in sorted(bundle.parts.items())]
    if not parts:
        raise Refused(f"bundle {bundle.id} has no part on this disk")
    nonfinite_loss = [p.rank for p in parts if p.header.loss is not None and p.header.loss - p.header.loss != 0]
    raw = [p.rank for p in parts if p.header.raw_gradients]
    before = [p.rank for p in parts if not p.header.state_after_step]
    return (raw or nonfinite_loss or before or [parts[0].rank])[0]


def _preload(script: Path) -> None:
    """Import here, once, what every trial would import: what torch imports late, and the script's installed packages."""
    for name in (*_LATE, *list(_imports(script))[:_PRELOADED_AT_MOST]):
        try:
            if name in sys.modules or not _is_installed(name):
                continue
            importlib.import_module(name)
        except _IMPORT_ERRORS:
            continue  # the script will say it better


def _imports(script: Path) -> Iterator[str]:
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    siblings = {path.stem: path for path in script.parent.glob("*.py")}
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            sibling = siblings.pop(name, None)
            if sibling is not None and sibling != script:
                yield from _imports(sibling)
            else:
                yield name


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name.partition(".")[0])
    return spec is not None and spec.origin is not None and "site-packages" in spec.origin


def _say(**words: str) -> None:
    print(json.dumps(words), flush=True)
