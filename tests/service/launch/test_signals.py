"""Signals after the job's end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The wakeup descriptor has a byte of every signal, also of one that comes before anybody waits for it.
ENDING = """
import os, signal
from sentinel.launch.signals import hold
came, told = os.pipe()
os.set_blocking(told, False)
signal.set_wakeup_fd(told)
hold("SIGTERM, SIGINT,NOSUCH", 7)
print("holding", flush=True)
while True:
    os.read(came, 1)
    print("noted", flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_leaves(sent: signal.Signals) -> None:
    """A signal that comes twice does not cut the ending short; whoever insists gets out with the job's exit code."""
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            process.send_signal(sent)
            assert process.stdout.readline() == "noted\n"
            process.send_signal(sent)
            assert process.wait(timeout=30) == 7
        finally:
            process.kill()  # or leaving this block would wait for it
