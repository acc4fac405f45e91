"""Entry point of the ``sentinel`` command: sends ``run`` to torchrun's parser and everything else to the command tree.

Owns that one choice. ``run`` imports torch but no command tree, every other command the reverse, so that each starts fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns its exit code, or leaves with SystemExit."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["run"]:
        from sentinel.cli.run import run

        return run(words[1:])
    from sentinel.cli.app import app

    app(words, prog_name="sentinel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
