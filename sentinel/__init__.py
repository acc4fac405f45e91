"""Sentinel: names the rank, step and tensor that made a distributed training job go nonfinite.

Owns the version and nothing else; import the defining module, never this package's root.
"""

__version__ = "0.1.0"
