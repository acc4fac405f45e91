"""``sentinel version``: which Sentinel this is, and what it found to work with."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from sentinel import __version__
from sentinel.cli.options import Output
from sentinel.cli.output import OutputFormat, put
from sentinel.wire.codec import PROTOCOL

PACKAGES = ("torch", "pyzmq", "msgspec", "pydantic", "safetensors")


def version(output: Output = OutputFormat.TABLE) -> None:
    """Print the version of Sentinel, of its protocol, and of the packages it works with."""
    found = {name: installed_version(name) for name in PACKAGES}
    if output is OutputFormat.JSON:
        put(json.dumps({"sentinel": __version__, "protocol": PROTOCOL, "python": platform.python_version(), **found}))
        return
    put(f"sentinel {__version__} (protocol {PROTOCOL}), python {platform.python_version()}")
    put(", ".join(f"{name} {seen or 'not installed'}" for name, seen in found.items()))


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, found without importing it; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
