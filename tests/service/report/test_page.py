"""The page, the text and the JSON of a report."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import past
import pytest
import story

from sentinel.bundle.manifest import LayerNorms
from sentinel.bundle.replayed import replay_file
from sentinel.postmortem.layers import layer_story
from sentinel.postmortem.report.facts import Facts, gather
from sentinel.postmortem.report.matrix import ROWS_SHOWN, matrices
from sentinel.postmortem.report.page import report_html
from sentinel.postmortem.report.plain import report_text
from sentinel.postmortem.report.record import report_json

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"


class Page(HTMLParser):
    """Tags and attributes of a page, and whether every tag is closed."""

    VOID = frozenset({"meta", "img", "br", "input", "hr", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_page_tells_the_story(facts: Facts) -> None:
    """Verdict, bad operation with its code, samples, precisions, parameters, lint and next steps are all on the page."""
    page = report_html([facts], "incident")
    for expected in (
        "At step 7, gradients became nonfinite on rank 1",
        "aten.div.Tensor",
        "return (x - x.mean(1)) / x.std(1)",
        "head.2.bias",
        "division_by_std",
        "sample 5 (data set index 235)",
        "the data, proven by replay",
        "reproduced twice, bit by bit",
        "Ranks by rounds",
        "sentinel dump show",
    ):
        assert expected.replace("'", "&#39;") in page, expected


def test_page_needs_nothing_from_elsewhere(facts: Facts) -> None:
    """No script, no link to another host, no inline style: the policy of the page allows its own style sheet and images only."""
    page = Page(report_html([facts], "incident"))
    names = [tag for tag, _ in page.tags]
    assert not {"script", "iframe", "object", "link", "form", "base"} & set(names)
    assert not page.open
    for tag, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on") or a == "style"], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:image/png;base64,", "#")), tag
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")


@pytest.fixture
def grown(facts: Facts) -> Facts:
    """The same, with a layer of a hostile name that grew before it broke."""
    norms = LayerNorms(rounds=tuple(range(10)), layers={EVIL: (*(1.0,) * 7, 40.0, 90.0, math.inf), "head": (2.0,) * 10})
    return replace(facts, layers=layer_story([story.header(0, layer_norms=norms)]))


def test_layers_that_grew_are_drawn_and_said(facts: Facts, grown: Facts) -> None:
    """Each format says which layer grew and which broke; the page has a curve more. Names stay text."""
    page, plain = report_html([grown], "t"), report_text([grown])
    assert page.count('<svg class="chart"') == report_html([facts], "t").count('<svg class="chart"') + 1
    assert "had grown 90-fold before, from 1 to 90" in page
    assert "had grown 90-fold before, from 1 to 90" in plain
    assert "<script" not in page
    told = json.loads(report_json([grown]))["reports"][0]["layers"]
    assert told["rank"] == 0
    assert told["norms"][EVIL][-1] == [9, "Infinity"]
    assert json.loads(report_json([facts]))["reports"][0]["layers"] is None


def test_hostile_names_stay_text(facts: Facts) -> None:
    """Parameter names, notes, paths and reasons that are HTML or template code come out as text."""
    assert facts.incident is not None
    finding = facts.incident.findings[0].model_copy(update={"note": EVIL, "op": EVIL})
    incident = facts.incident.model_copy(update={"parameters": (EVIL,), "reason": EVIL, "findings": (finding,)})
    header = story.header(
        1, environment=facts.headers[0].environment.model_copy(update={"argv": (EVIL,), "host": EVIL})
    )
    hostile = replace(facts, incident=incident, headers=(header,), script=EVIL, missing=(EVIL,))
    page = report_html([hostile], EVIL)
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "49" not in re.findall(r"onerror=alert\(2\)&gt;(.{4})", page)
    Page(page)


def test_report_without_anything_still_renders() -> None:
    """No incident, no bundle, no log: each format has its plain answer."""
    assert "No incidents." in report_html([], "run")
    assert report_text([]) == "No incidents."
    assert json.loads(report_json([]))["reports"] == []


def test_incident_without_bundle_renders() -> None:
    """An incident whose bundle was not kept has its verdict, and says that replay is not possible."""
    facts = gather(story.incident(bundle=None), None, None, ())
    assert "No bundle was kept" in report_html([facts], "incident")
    assert "No bundle was kept" in report_text([facts])


@pytest.mark.parametrize("damage", ["part", "batches", "replay", "gone"])
def test_damaged_bundle_is_reported_as_far_as_it_can_be_read(run_dir: Path, damage: str) -> None:
    """Broken JSON, a broken tensor file, a broken replay record or no bundle at all never stop the report."""
    bundle = run_dir / "bundles" / story.BUNDLE
    target = {
        "part": bundle / "rank-00001" / "part.json",
        "batches": bundle / "rank-00001" / "batches.safetensors",
        "replay": bundle / replay_file(1),
    }.get(damage)
    if target is not None:
        target.write_bytes(b"\x00\xff{")
    else:
        bundle = bundle.with_name("elsewhere")
    facts = gather(story.incident(), bundle, run_dir, past.log())
    page = report_html([facts], "incident")
    assert "At step 7" in page
    assert damage == "batches" or facts.missing
    assert report_text([facts])
    assert json.loads(report_json([facts]))


def test_bundle_alone_has_a_page(run_dir: Path) -> None:
    """A bundle without its run's database shows what its ranks kept."""
    facts = gather(None, run_dir / "bundles" / story.BUNDLE, None, ())
    page = report_html([facts], "bundle")
    assert f"Bundle {story.BUNDLE}" in page
    assert "data:image/png;base64," in page
    assert story.BUNDLE in report_text([facts])


def test_json_is_valid_everywhere(facts: Facts) -> None:
    """NaN and infinities are strings, so that any JSON parser reads the report."""

    def refuse(token: str) -> None:
        raise AssertionError(token)

    (report,) = json.loads(report_json([facts]), parse_constant=refuse)["reports"]
    assert report["incident"]["id"] == story.incident().id
    assert report["replays"][0]["first_bad_op"]["op"] == "aten.div.Tensor"
    assert report["nonfinite"] == {"gradients": ["head.2.bias"]}
    assert report["lint"][0]["rule"] == "division_by_std"
    assert "NaN" in {cell["loss"] for cell in report["rounds"]}


def test_several_incidents_share_a_page(facts: Facts) -> None:
    """A run's page lists its incidents, each with a link to its own part of the page."""
    assert facts.incident is not None
    other = replace(facts, incident=facts.incident.model_copy(update={"id": "a0-r000009-01", "step": 9}))
    page = report_html([facts, other], "run")
    assert "2 incidents" in page
    assert 'href="#a0-r000009-01"' in page
    assert 'id="a0-r000009-01"' in page


def test_replay_that_settles_nothing_proves_nothing(facts: Facts) -> None:
    """A replay that did not reproduce the fault is told as that, and the cause stays a first reading."""
    (replay,) = facts.replays
    unsettled = replay.model_copy(update={"reproduced": False, "cause": "unknown", "first_bad_op": None})
    page = report_html([replace(facts, replays=(unsettled,))], "incident")
    assert "not reproduced" in page
    assert "proven by replay" not in page
    assert "replay did not settle it" in page


def test_replay_of_another_round_proves_nothing(facts: Facts) -> None:
    """A bundle may be of a later round than the incident: its replay is shown with its round, and settles no cause."""
    assert facts.incident is not None
    earlier = replace(facts, incident=facts.incident.model_copy(update={"round": 6}))
    assert earlier.proven is None
    page = report_html([earlier], "incident")
    assert "replay of rank 1, round 7" in page
    assert "proven by replay" not in page


def test_script_is_linted_where_no_bundle_was_kept(tmp_path: Path) -> None:
    """Without a part the launcher's own record names the script; a damaged record names none."""
    script = tmp_path / "train.py"
    script.write_text("import torch\ny = x / x.std()\n")
    record = tmp_path / "run.json"
    record.write_text(json.dumps({"argv": ["--nproc-per-node", "2", str(script)]}))
    facts = gather(story.incident(bundle=None), None, tmp_path, ())
    assert (facts.script, [f.rule for f in facts.lint]) == (str(script), ["division_by_std"])
    for damaged in ("[]", "{", '{"argv": 3}', '{"argv": [1, null]}'):
        record.write_text(damaged)
        assert gather(story.incident(bundle=None), None, tmp_path, ()).script == ""


def test_guilty_samples_are_marked_in_every_tensor_of_the_batch(facts: Facts) -> None:
    """What replay found guilty is marked, also where the sample looks like any other."""
    plain = [
        (t.name, [s.odd for s in t.samples if s.index == 5]) for b in facts.batches for t in b.tensors if b.rank == 1
    ]
    assert plain == [("b0.image", ["constant: every element is 7"])]
    assert facts.proven is not None


def test_matrix_is_bounded_and_keeps_what_is_nonfinite() -> None:
    """Of a thousand parameters those that are nonfinite are kept, wherever they stand."""
    one = story.header(1).gradient_statistics[0]
    many = tuple(one.model_copy(update={"name": f"p{i}", "nan": int(i == 900), "maximum": 1.0}) for i in range(1000))
    (matrix,) = matrices([story.header(0, gradient_statistics=()), story.header(1, gradient_statistics=many)])
    assert len(matrix.rows) == ROWS_SHOWN
    assert (matrix.rows_total, matrix.nonfinite) == (1000, 1)
    assert matrix.rows[0][0] == "p900"
    assert [cell.style for cell in matrix.rows[0][1]] == ["none", "nonfinite"]
