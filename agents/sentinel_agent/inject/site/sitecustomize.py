"""Found first on PYTHONPATH by every Python under the launcher: prepares the agent, and runs the sitecustomize it hides.

Must cost nothing in processes that never import torch, and must never fail.
"""

import importlib.util
import os
import sys


def _run_hidden() -> None:
    """Run the next ``sitecustomize`` on the path, as if this one were not there (nor another copy of it)."""
    seen = sys.__dict__.setdefault("_sentinel_sites", [])
    seen.append(os.path.dirname(os.path.abspath(__file__)))
    for entry in sys.path:
        candidate = os.path.join(entry or ".", "sitecustomize.py")
        if os.path.abspath(entry or ".") not in seen and os.path.isfile(candidate):
            spec = importlib.util.spec_from_file_location("sitecustomize", candidate)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                sys.modules["sitecustomize"] = module
                spec.loader.exec_module(module)
            return


def _prepare() -> None:
    if os.environ.get("SENTINEL_AGENT") != "1":
        return
    try:
        from sentinel_agent.inject.hooks import prepare
    except ImportError as error:
        print(f"sentinel: agent cannot be imported in {sys.executable}, unwatched: {error}", file=sys.stderr)
        return
    prepare()


_prepare()
_run_hidden()
