"""A real Prometheus, a real Alertmanager and a webhook receiver, on free ports below one folder (helpers of tests)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from launch_job import free_port

from sentinel.coordinator.exports.alerts import ALERTS, Alert
from sentinel.coordinator.exports.rules import prometheus_rules

INTERVAL_SECONDS = 1
GROUP_WAIT_SECONDS = 1
DEPLOY = Path(__file__).parents[1] / "deploy"


def need(*programs: str) -> None:
    """Skip the test, or fail it in CI, if one of these programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (as root: apt-get install prometheus prometheus-alertmanager)"
        )


def tool(*words: str, cwd: Path = DEPLOY.parent) -> str:
    """What promtool or amtool says; fails if it is not content, skips if it is not installed."""
    need(words[0])
    ran = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def poll(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``; fails after ``seconds``, saying what did not happen."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"did not happen within {seconds} s: {what}"
        time.sleep(0.05)


class Webhook:
    """Receives Alertmanager's notifications; each alert in them is kept with the moment it came."""

    def __init__(self) -> None:
        received: list[tuple[float, str, dict[str, Any]]] = []

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.extend((time.time(), self.path, alert) for alert in body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def firing(self, name: str) -> list[tuple[float, str, dict[str, Any]]]:
        """(moment, path, alert) of every firing notification of the alert called ``name``."""
        return [r for r in self.received if r[2]["status"] == "firing" and r[2]["labels"]["alertname"] == name]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class Monitoring:
    """Prometheus with our rules and file_sd below ``targets``, Alertmanager with our routes, both asked every second."""

    def __init__(self, place: Path, webhook: Webhook, wait: str | None = None) -> None:
        self.targets = place / "targets"
        self.targets.mkdir(parents=True)
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []
        self.alertmanager = f"http://127.0.0.1:{free_port()}"
        self.prometheus = f"http://127.0.0.1:{free_port()}"
        self._write_alertmanager(webhook)
        self._write_prometheus(wait)

    def start(self) -> None:
        """Start both and wait until they answer."""
        self._start(
            "prometheus-alertmanager",
            self.alertmanager,
            "--config.file=alertmanager.yml",
            "--storage.path=am",
            "--cluster.listen-address=",
            "--log.level=warn",
        )
        self._start(
            "prometheus",
            self.prometheus,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=tsdb",
            "--log.level=warn",
        )
        for url in (self.prometheus, self.alertmanager):
            poll(lambda url=url: self._answers(f"{url}/-/ready"), 30, f"{url} is ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Result of an instant query."""
        return self._get(f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["data"][
            "result"
        ]

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that Prometheus holds, pending ones too."""
        return self._get(f"{self.prometheus}/api/v1/alerts")["data"]["alerts"]

    def inhibited(self) -> dict[str, bool]:
        """Whether each alert that Alertmanager holds is inhibited, by name."""
        held = self._get(f"{self.alertmanager}/api/v2/alerts")
        return {alert["labels"]["alertname"]: bool(alert["status"]["inhibitedBy"]) for alert in held}

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(20)

    def _write_alertmanager(self, webhook: Webhook) -> None:
        text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
        text = text.replace("http://127.0.0.1:9099", webhook.url).replace("group_wait: 10s", "group_wait: 1s")
        (self._place / "alertmanager.yml").write_text(text.replace("group_interval: 2m", "group_interval: 2s"))

    def _write_prometheus(self, wait: str | None) -> None:
        (self._place / "sentinel.rules.yml").write_text(prometheus_rules([_shorter(alert, wait) for alert in ALERTS]))
        config = {
            "global": {"scrape_interval": f"{INTERVAL_SECONDS}s", "evaluation_interval": f"{INTERVAL_SECONDS}s"},
            "rule_files": ["sentinel.rules.yml"],
            "alerting": {
                "alertmanagers": [{"static_configs": [{"targets": [self.alertmanager.removeprefix("http://")]}]}]
            },
            "scrape_configs": [
                {
                    "job_name": "sentinel-runs",
                    "file_sd_configs": [{"files": [f"{self.targets}/*.json"]}],
                    "sample_limit": 600,
                    "label_limit": 16,
                    "label_value_length_limit": 256,
                }
            ],
        }
        (self._place / "prometheus.yml").write_text(json.dumps(config))

    def _start(self, program: str, url: str, *arguments: str) -> None:
        log = (self._place / f"{program}.log").open("wb")
        words = [program, *arguments, f"--web.listen-address={url.removeprefix('http://')}"]
        self._processes.append(
            subprocess.Popen(words, cwd=self._place, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "2"})
        )
        log.close()

    def _answers(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)


def _shorter(alert: Alert, wait: str | None) -> Alert:
    """The alert with its waiting time cut to ``wait``, so that a test need not wait minutes for what promtool tests as written."""
    shortened = wait if wait and alert.wait != "0m" else alert.wait
    return Alert(alert.name, alert.expr, alert.severity, alert.summary, alert.description, shortened, alert.keep)
