"""Reading files, silencing findings, choosing rules, and files that are not what they should be."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from sentinel.postmortem.lint.check import MAX_FILE_BYTES, chosen_rules, lint_paths, lint_text
from sentinel.postmortem.lint.registry import RULES
from sentinel.postmortem.lint.source import SourceRefused

BAD = "import torch\ny = x / x.std()\n"


def test_finding_names_its_place() -> None:
    """A finding says file, line and column (from 1), rule, reason in numbers, repair and page."""
    (finding,) = lint_text(BAD, "train.py")
    assert (finding.path, finding.line, finding.column, finding.end_line) == ("train.py", 2, 5, 2)
    assert finding.rule == "division_by_std"
    assert "`x.std()`" in finding.message
    assert finding.page.endswith("#division_by_std")


@pytest.mark.parametrize(
    "comment",
    ["# sentinel: ignore[division_by_std]", "# sentinel:ignore", "#sentinel: ignore[p_log_p, division_by_std]"],
)
def test_comment_silences_a_rule(comment: str) -> None:
    """A comment on the line, or alone on the line above, silences the rules it names, or all."""
    assert lint_text(f"import torch\ny = x / x.std()  {comment}\n", "a.py") == []
    assert lint_text(f"import torch\n{comment}\ny = x / x.std()\n", "a.py") == []


@pytest.mark.parametrize("comment", ["# sentinel: ignore[p_log_p]", "# noqa", "# sentinel"])
def test_other_comment_silences_nothing(comment: str) -> None:
    """A comment about another rule or another tool changes nothing."""
    assert len(lint_text(f"import torch\ny = x / x.std()  {comment}\n", "a.py")) == 1


def test_comment_of_the_line_before_counts_only_alone() -> None:
    """What silences the line above does not silence the next one."""
    text = "import torch\na = x / x.std()  # sentinel: ignore\nb = z / z.std()\n"
    assert [f.line for f in lint_text(text, "a.py")] == [3]


def test_silencing_inside_a_string_does_not_count() -> None:
    """Only comments silence; the same words in a string do nothing."""
    assert len(lint_text('import torch\ny = x / x.std(), "# sentinel: ignore"\n', "a.py")) == 1


def test_statement_over_several_lines_is_silenced_on_any_of_them() -> None:
    """The comment may stand on any line of the expression in question."""
    text = "import torch\ny = (x - x.mean()) / x.std(\n    1, keepdim=True  # sentinel: ignore[division_by_std]\n)\n"
    assert lint_text(text, "a.py") == []


def test_rules_are_chosen_by_name() -> None:
    """--select keeps the named rules, --ignore drops them, and a name that is no rule is an error."""
    assert [rule.id for rule in chosen_rules(select=["p_log_p"])] == ["p_log_p"]
    assert "p_log_p" not in {rule.id for rule in chosen_rules(ignore=["p_log_p"])}
    assert len(chosen_rules()) == len(RULES)
    with pytest.raises(KeyError):
        chosen_rules(select=["p_log_q"])


def test_folders_are_searched(tmp_path: Path) -> None:
    """Python files below a folder are read, those of virtual environments and build folders are not."""
    for name in ("a.py", "deep/b.py", ".venv/c.py", "build/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BAD)
    result = lint_paths([tmp_path], chosen_rules())
    assert [Path(f.path).name for f in result.findings] == ["a.py", "b.py"]
    assert result.files == 2


def test_file_that_is_not_python_is_refused_in_one_line(tmp_path: Path) -> None:
    """Broken syntax, other encodings, missing and huge files are named with the reason; the others are still read."""
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\x00\n")
    (tmp_path / "huge.py").write_text("#" * (MAX_FILE_BYTES + 1))
    (tmp_path / "good.py").write_text(BAD)
    names = ("broken.py", "latin.py", "null.py", "huge.py", "absent.py", "good.py")
    result = lint_paths([tmp_path / name for name in names], chosen_rules())
    assert len(result.refused) == 5
    assert all("\n" not in line for line in result.refused)
    assert "line 1" in result.refused[0]
    assert len(result.findings) == 1


def test_deeply_nested_source_is_refused_and_does_not_crash() -> None:
    """Nesting beyond what Python parses is a refusal, not a crash."""
    with pytest.raises(SourceRefused):
        lint_text("import torch\nx = " + "(" * 5000 + "1" + ")" * 5000 + "\n", "a.py")


def test_long_chains_are_read() -> None:
    """A sum of a thousand terms, which nests a thousand deep, passes every rule."""
    text = "import torch\nx = " + " + ".join(f"a{n}.half()" for n in range(600)) + "\n"
    assert lint_text(text, "a.py") == []


def test_no_rule_stumbles_over_odd_code() -> None:
    """Random mutilations of a real script are either refused or linted; no rule raises."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    corpus = sorted((Path(__file__).parents[2] / "corpus").glob("*.py"))
    for _ in range(60):
        lines = chance.choice(corpus).read_text().splitlines()
        for _ in range(chance.randrange(1, 4)):
            del lines[chance.randrange(len(lines))]
        try:
            lint_text("\n".join(lines), "odd.py")
        except SourceRefused:
            continue


def test_long_functions_are_linted_in_reasonable_time() -> None:
    """A function of 4,000 lines, in which every value hangs on the one before, takes seconds and not minutes."""
    body = "\n".join(
        f"    a{n} = a{n - 1} + x.half()\n    b{n} = a{n} / (a{n}.std() + eps)\n    if a{n} > 0:\n        c = b{n} / z.norm()"
        for n in range(1, 1000)
    )
    started = time.monotonic()
    lint_text(f"import torch\ndef f(x, z, eps, a0):\n{body}\n", "a.py")
    assert time.monotonic() - started < 30
