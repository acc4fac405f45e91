"""Deployment files: what they promise about users, file systems, ports and secrets, and that they agree with the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alerting import need, tool

from sentinel.coordinator.config import CoordinatorSettings

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
EVERY_YAML = sorted([*DEPLOY.glob("**/*.yaml"), *DEPLOY.glob("**/*.yml")])


def objects(folder: str) -> list[dict[str, Any]]:
    """Every object that a kustomization lists."""
    listed = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())["resources"]
    return [one for name in listed for one in yaml.safe_load_all((KUBERNETES / folder / name).read_text())]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every pod with each of its containers."""
    pods = [
        one["spec"]["template"]["spec"]
        for folder in ("base", "training")
        for one in objects(folder)
        if "template" in one.get("spec", {})
    ]
    return [(pod, container) for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("path", EVERY_YAML, ids=lambda p: str(p.relative_to(DEPLOY)))
def test_every_file_is_yaml(path: Path) -> None:
    """Every YAML file of deploy can be read, and none is empty."""
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_no_container_is_root() -> None:
    """No pod runs as root or gains privileges; every capability is dropped, and every container has bounds."""
    assert len(containers()) == 2
    for pod, container in containers():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"])


def test_service_links_cannot_become_settings() -> None:
    """Kubernetes would name variables of a service SENTINEL_COORDINATOR_...; pods that read settings of that prefix refuse them."""
    prefix = CoordinatorSettings.model_config["env_prefix"]
    names = [one["metadata"]["name"] for one in objects("base") if one["kind"] == "Service"]
    assert any(name.upper().replace("-", "_").startswith(prefix.rstrip("_")) for name in names)
    assert all(pod["enableServiceLinks"] is False for pod, _ in containers())


def test_the_coordinator_can_do_without_writing_to_its_image() -> None:
    """Its root file system is read-only in compose and Kubernetes, and what it writes lies on a volume."""
    [(_, container)] = [(p, c) for p, c in containers() if c["name"] == "coordinator"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/var/lib/sentinel", "/run/secrets", "/tmp"}
    service = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["coordinator"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_pages_are_not_published_beyond_the_host() -> None:
    """Compose publishes pages and tools on loopback only; relays alone are open, under CURVE."""
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    open_ports = [
        port for service in services.values() for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")
    ]
    assert open_ports == ["9471:9471"]


def test_ports_and_selectors_agree() -> None:
    """Service, probes, monitor and policy name the container's ports, and select the coordinator's pods."""
    base = {one["kind"]: one for one in objects("base")}
    template = base["Deployment"]["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in base["Service"]["spec"]["ports"]} == ports
    labels = template["metadata"]["labels"]
    [monitor] = [one for one in objects("monitoring") if one["kind"] == "PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    for selected in (
        base["NetworkPolicy"]["spec"]["podSelector"],
        monitor["spec"]["selector"],
        base["Deployment"]["spec"]["selector"],
    ):
        assert selected["matchLabels"] == labels
    [job] = [one for one in objects("training") if one["kind"] == "Job"]
    allowed = base["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_the_job_is_not_repeated_after_a_halt() -> None:
    """Exit code 93 fails the job at once; anything else is tried again."""
    [job] = [one for one in objects("training") if one["kind"] == "Job"]
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [93])
    assert job["spec"]["completions"] == 2


def test_the_jobs_arguments_are_the_launchers() -> None:
    """`sentinel run` understands what the job's pods give it."""
    from sentinel.launch.options import build_parser

    [(_, container)] = [(p, c) for p, c in containers() if c["name"] == "train"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    parsed = build_parser({}).parse_args(words)
    assert (parsed.nnodes, parsed.node_rank, parsed.sentinel_run_id) == ("2", 1, "sentinel-demo")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_built_with_care(path: Path) -> None:
    """Not root, nothing called latest, no cache left behind, and torch is the base image's own or absent."""
    text = path.read_text()
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert image == "${BASE}" or (":" in image and not image.endswith(":latest"))
    assert all(
        "--no-cache-dir" in line for line in text.splitlines() if "pip install" in line and not line.startswith("#")
    )
    assert not re.search(r"pip install[^\n]*torch", text)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (DEPLOY.parent / name).exists(), name


def test_the_build_context_holds_nothing_else() -> None:
    """What is not copied is not sent to the builder: secrets, runs and history stay out of images."""
    lines = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        n
        for path in DOCKERFILES
        for s in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
        for n in s.split()
    }
    assert copied == allowed


def test_health_is_asked_of_the_page_that_needs_no_token() -> None:
    """Image and pods ask /healthz."""
    assert "/healthz" in (DEPLOY / "docker" / "Dockerfile").read_text()
    [(_, container)] = [(p, c) for p, c in containers() if c["name"] == "coordinator"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/healthz"}


def test_prometheus_in_compose_is_accepted() -> None:
    """promtool accepts the configuration that compose mounts."""
    assert "SUCCESS" in tool("promtool", "check", "config", "--syntax-only", str(DEPLOY / "docker" / "prometheus.yml"))


def test_the_batch_script_is_shell() -> None:
    """bash reads the sbatch script, and it does not put a halted job back into the queue."""
    script = DEPLOY / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    assert os.access(script, os.X_OK)
    assert "93" in script.read_text()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd-analyze has nothing to say but that Sentinel is not installed where the unit expects it."""
    if shutil.which("systemd-analyze") is None and os.environ.get("CI") == "true":
        pytest.fail("systemd-analyze is missing in CI: install the package systemd")
    need("systemd-analyze")
    unit = tmp_path / "sentinel-coordinator.service"
    text = (DEPLOY / "systemd" / "sentinel-coordinator.service").read_text()
    unit.write_text(text.replace("/opt/sentinel/bin/sentinel", "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    ours = [line for line in (ran.stdout + ran.stderr).splitlines() if "sentinel-coordinator.service" in line]
    assert not ours


@pytest.mark.parametrize("folder", ["base", "monitoring", "training"])
def test_kustomize_builds(folder: str) -> None:
    """Every file of a folder is listed and everything goes into one namespace; kubectl, where it is installed, agrees."""
    listed = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
    there = {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed["resources"]) == there
    assert listed["namespace"] == "sentinel"
    if shutil.which("kubectl"):
        built = list(yaml.safe_load_all(tool("kubectl", "kustomize", str(KUBERNETES / folder))))
        assert len(built) == len(objects(folder))
        assert {one["metadata"].get("namespace") for one in built if one["kind"] != "Namespace"} == {"sentinel"}
