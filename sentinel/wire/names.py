"""The names that agents, relays and coordinators agree on outside the messages: environment variables and files.

Owns spelling only. Reading the environment happens in one file per process (``sentinel_agent/config.py`` for ranks,
``sentinel/launch/options.py`` for the launcher, ``sentinel/coordinator/config.py`` for the coordinator).
"""

from __future__ import annotations

# Set by the launcher, read by the agent inside each training process.
ENV_AGENT = "SENTINEL_AGENT"  # "1" switches the injected agent on
ENV_RUN_ID = "SENTINEL_RUN_ID"
ENV_RUN_DIR = "SENTINEL_RUN_DIR"  # absolute path; bundles are written below it
ENV_NODE = "SENTINEL_NODE"  # index of this launcher's node, 0-based
ENV_RELAY = "SENTINEL_RELAY"  # ipc:// address of the node's relay
ENV_COMMAND_KEY = "SENTINEL_COMMAND_KEY"  # hex; commands to ranks carry an HMAC-SHA256 under it
ENV_AGENT_OPTIONS = "SENTINEL_AGENT_OPTIONS"  # JSON object, fields of sentinel_agent.config.AgentConfig

# Read by clients (run, status, incidents, dump) as defaults of their flags.
ENV_ENDPOINT = "SENTINEL_ENDPOINT"  # tcp://host:port of a coordinator's ROUTER
ENV_SERVER_KEY = "SENTINEL_SERVER_KEY"  # Z85 CURVE public key of that coordinator
ENV_JOIN = "SENTINEL_JOIN"  # path of a join file
ENV_HTTP = "SENTINEL_HTTP"  # http://host:port of a coordinator's pages

# Files of a run directory.
DATABASE = "sentinel.db"
BUNDLES = "bundles"
MANIFEST = "manifest.json"
JOIN_FILE = "join.json"
LOCK_FILE = "coordinator.lock"  # held by the one coordinator that works here
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
HALTED_FILE = "halted.json"  # the guard ended this node's training on purpose: no restart
SPOOL = "spool"  # reports that no coordinator acknowledged


def bundle_id(attempt: int, round_: int) -> str:
    """Name of the bundle of one round: every rank and the coordinator derive it alone, so a dump needs no message."""
    return f"a{attempt}-r{round_:06d}"


def rank_directory(rank: int) -> str:
    """Name of one rank's part inside a bundle."""
    return f"rank-{rank:05d}"
