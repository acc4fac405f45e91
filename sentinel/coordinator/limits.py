"""The process's limit on open files: raised as far as it goes, and too low said before the first relay is lost to it.

Owns that one limit. One relay takes one descriptor; beyond the limit new relays would stay silently unheard.
"""

from __future__ import annotations

import resource

RESERVED = 128  # database, pages, sockets of our own
HEADROOM = 1.2


class LimitTooLow(RuntimeError):
    """The open-files limit cannot hold the expected relays; the text says both numbers."""


def raise_open_files(expected_relays: int) -> int:
    """Raise the soft limit to the hard one and return it. Raises LimitTooLow if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = int(HEADROOM * expected_relays) + RESERVED
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitTooLow(f"{expected_relays} relays need {needed} open files, the limit is {hard} (ulimit -Hn)")
    return hard
