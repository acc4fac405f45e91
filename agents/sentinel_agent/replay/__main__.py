"""``python -m sentinel_agent.replay``: what ``sentinel replay`` starts. Owns nothing but the start."""

import sys

from sentinel_agent.replay.server import serve

sys.exit(serve())
