"""The command line of ``sentinel run``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from sentinel.launch import options
from sentinel.launch.options import UsageError, parse
from sentinel.wire.link import Join

JOIN = Join(
    endpoint="tcp://10.0.0.1:5555",
    server_key="s" * 40,
    client_public="p" * 40,
    client_secret="c" * 40,
    command_key="ab" * 32,
)


def _sample_value(action: argparse.Action) -> list[str]:
    """Words that give a flag of torchrun's parser some value other than its default."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(next(iter(action.choices)))]
    return {int: ["3"], float: ["0.5"]}.get(action.type, ["2:4"])  # type: ignore[call-overload,no-any-return]


def _torchrun_flags() -> Iterator[tuple[str, ...]]:
    for action in get_args_parser()._actions:
        for spelling in action.option_strings:
            if action.dest != "help":
                yield (spelling, *_sample_value(action))


@pytest.mark.parametrize("flag", list(_torchrun_flags()), ids=lambda flag: flag[0])
def test_every_torchrun_flag_parses_as_torchrun_parses_it(flag: tuple[str, ...]) -> None:
    """Each flag of torchrun, in each spelling, gives the very namespace that torchrun's own parser gives."""
    argv = [*flag, "train.py", "--lr", "0.1", flag[0]]
    assert parse(argv, {}).torchrun == get_args_parser().parse_args(argv)


def test_there_are_flags_to_compare() -> None:
    """The comparison above covers torchrun's flags in both spellings."""
    spellings = {flag[0] for flag in _torchrun_flags()}
    assert {"--nproc-per-node", "--nproc_per_node", "--rdzv-endpoint", "--max_restarts", "-m", "-t"} <= spellings


@pytest.mark.parametrize("word", ["--nproc-per", "--rdzv-end"])
def test_abbreviations_stay_torchruns(word: str) -> None:
    """A unique prefix of a torchrun flag means what it means to torchrun."""
    argv = [word, "4", "train.py"]
    assert parse(argv, {}).torchrun == get_args_parser().parse_args(argv)


def test_environment_defaults_of_torchrun_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_* variables set torchrun's flags under Sentinel too."""
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_RDZV_ID", "job7")
    parsed = parse(["train.py"], {})
    assert (parsed.nodes, parsed.world_size, parsed.run_id) == ((3, 3), 6, "job7")
    assert parsed.torchrun == get_args_parser().parse_args(["train.py"])


@pytest.mark.parametrize("spelling", ["--sentinel-run-dir", "--sentinel_run_dir"])
def test_sentinel_flags_take_both_spellings(spelling: str, tmp_path: Path) -> None:
    """Dashes and underscores name the same Sentinel flag, as with torchrun's own."""
    assert parse([spelling, str(tmp_path / "d"), "train.py"], {}).run_dir == tmp_path / "d"


def test_flags_win_over_the_environment() -> None:
    """A --sentinel flag overrides its SENTINEL_ variable, which overrides the default."""
    environ = {
        "SENTINEL_WINDOW": "5",
        "SENTINEL_MAX_BUNDLES": "9",
        "SENTINEL_DUMP_LEVEL": "stats",
        "SENTINEL_QUIET": "1",
    }
    parsed = parse(["--sentinel-window", "7", "train.py"], environ)
    assert (parsed.window, parsed.max_bundles, parsed.dump_level, parsed.quiet) == (7, 9, "stats", True)
    plain = parse(["train.py"], {})
    assert (plain.window, plain.max_bundles, plain.dump_level, plain.quiet) == (None, None, None, False)


@pytest.mark.parametrize(("given", "budget"), [("5", (5, 50)), ("5,7", (5, 7))])
def test_a_budget_of_skips_is_in_a_row_and_in_all(given: str, budget: tuple[int, int]) -> None:
    """``N,TOTAL`` says both; ``N`` alone allows ten times as many in all."""
    assert parse(["--sentinel-max-skips", given, "train.py"], {}).max_skips == budget


def test_words_after_the_script_belong_to_the_script() -> None:
    """Everything after the training script is the script's, even if it looks like one of our flags."""
    parsed = parse(["train.py", "--sentinel-quiet", "--nnodes", "4"], {})
    assert parsed.torchrun.training_script_args == ["--sentinel-quiet", "--nnodes", "4"]
    assert not parsed.quiet
    assert parsed.nodes == (1, 1)


def test_nothing_of_ours_reaches_torchrun() -> None:
    """torchrun's namespace carries no sentinel attribute."""
    assert not [name for name in vars(parse(["train.py"], {}).torchrun) if name.startswith(options.PREFIX)]


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--nope", "train.py"], {}, "unrecognized arguments: --nope"),
        ([], {}, "training_script"),
        (["--sentinel-window", "0", "train.py"], {}, "not 1 or more"),
        (["--sentinel-dump-level", "all", "train.py"], {}, "not one of stats, batch, full"),
        (["--sentinel-redact", "mine.redact", "train.py"], {}, "not module:function"),
        (["--sentinel-redact", "a b:f", "train.py"], {}, "not module:function"),
        (["train.py"], {"SENTINEL_DUMP_LEVEL": "all"}, "not one of stats, batch, full"),
        (["train.py"], {"SENTINEL_MAX_BUNDLES": "many"}, "invalid _positive value"),
        (["--sentinel-guard", "stop", "train.py"], {}, "not one of observe, skip, halt"),
        (["--sentinel-max-skips", "0", "train.py"], {}, "not 1 or more"),
        (["--sentinel-join", "/nowhere/join.json", "train.py"], {}, "cannot read join file"),
        (["--sentinel-endpoint", "tcp://h:1", "train.py"], {}, "alone cannot join"),
        (["--sentinel-run-id", "a\nb", "train.py"], {}, "run id"),
        (["--sentinel-http-bind", "9400", "train.py"], {}, "host:port"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint(argv: list[str], environ: dict[str, str], message: str) -> None:
    """A command line that cannot be followed is refused in one line that names the word, with a hint."""
    with pytest.raises(UsageError, match=message) as refused:
        parse(argv, environ)
    assert "\n" not in str(refused.value)
    assert refused.value.hint


def test_a_join_file_is_read_and_its_endpoint_can_be_replaced(tmp_path: Path) -> None:
    """--sentinel-join gives the keys; --sentinel-endpoint only says where the same coordinator is reached from here."""
    path = tmp_path / "join.json"
    JOIN.write(path)
    assert parse(["--sentinel-join", str(path), "train.py"], {}).join == JOIN
    moved = parse(["train.py"], {"SENTINEL_JOIN": str(path), "SENTINEL_ENDPOINT": "tcp://127.0.0.1:7"}).join
    assert moved == JOIN.model_copy(update={"endpoint": "tcp://127.0.0.1:7"})


def test_a_file_that_is_no_join_file_is_a_usage_error(tmp_path: Path) -> None:
    """A join file with something else in it is refused by name, without its contents."""
    path = tmp_path / "join.json"
    path.write_text('{"endpoint": "secret-canary"}')
    with pytest.raises(UsageError, match="not a join file") as refused:
        parse(["--sentinel-join", str(path), "train.py"], {})
    assert "secret-canary" not in str(refused.value)


def test_a_launcher_inside_a_worker_begins_its_own_run() -> None:
    """The run id and directory in a worker's environment are its own run's, not defaults of a nested launch."""
    worker = {"SENTINEL_AGENT": "1", "SENTINEL_RUN_ID": "outer", "SENTINEL_RUN_DIR": "/outer"}
    nested = parse(["train.py"], worker)
    assert (nested.run_id, nested.run_dir) == (None, None)


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (["--nproc-per-node", "2", "x.py"], 2),
        (["--nnodes", "2", "--nproc-per-node", "4", "x.py"], 8),
        (["--nnodes", "1:4", "--nproc-per-node", "4", "x.py"], 0),
        (["--nproc-per-node", "gpu", "x.py"], 0),
        (["--nnodes", "nonsense", "x.py"], 0),
    ],
)
def test_world_size_is_known_only_where_it_is_fixed(argv: list[str], world_size: int) -> None:
    """An elastic or device-derived number of ranks is left for the ranks to say."""
    assert parse(argv, {}).world_size == world_size


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows torchrun's flags, ours, and examples."""
    with pytest.raises(SystemExit) as left:
        parse(["--help"], {})
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert all(text in shown for text in ("--nproc-per-node", "--sentinel-run-dir", "examples:", "SENTINEL_RUN_DIR"))


@pytest.mark.parametrize(("environ", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_needs_a_terminal_that_wants_it(
    environ: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR and dumb terminals get none; neither does a file."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert options.wants_colour(environ) is colour
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert not options.wants_colour(environ)
