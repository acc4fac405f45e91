"""Charts and pictures: well-formed, bounded, and honest about what is not finite."""

from __future__ import annotations

import base64
import math
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import past
import pytest
import story

from sentinel.postmortem.report.curves import LINES_PER_RANK, curves
from sentinel.postmortem.report.images import INF_COLOUR, MAX_SIDE, NAN_COLOUR, data_uri, picture
from sentinel.postmortem.report.rounds import history
from sentinel.postmortem.report.svg import Line, heat_map, histogram, line_chart

NAN, INF = math.nan, math.inf


def parsed(drawing: str | None) -> ElementTree.Element:
    """The drawing as XML."""
    assert drawing is not None
    return ElementTree.fromstring(drawing)


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2.0, 3.0),
        (1.0, 1.0, 1.0),
        (0.0, 0.0, NAN),
        (1e-300, 1e300, INF),
        (-5.0, NAN, -INF),
        (1e308, -1e308, 0.0),
        (None, 4.0, None),
    ],
)
def test_line_chart_is_drawn_for_any_numbers(values: tuple[float | None, ...]) -> None:
    """Constant, huge, tiny, negative, missing and nonfinite values give a chart with coordinates inside it."""
    drawing = line_chart("loss", [Line("rank 0", "other", tuple(enumerate(values)))], 1)
    assert "nan" not in "".join(e.get("d", "") + e.get("y1", "") for e in parsed(drawing).iter())
    marks = [e for e in parsed(drawing).iter() if e.get("class") == "nonfinite"]
    assert len(marks) == sum(1 for v in values if v is not None and not math.isfinite(v))


def test_line_chart_without_values_is_left_out() -> None:
    """A series that was never reported, or only as NaN, draws nothing."""
    assert line_chart("loss", [Line("rank 0", "other", ((0, None), (1, None)))], 0) is None
    assert line_chart("loss", [Line("rank 0", "other", ((0, NAN),))], 0) is None


def test_labels_are_escaped() -> None:
    """What comes from a training process cannot leave the text it stands in."""
    drawing = line_chart("</svg><script>", [Line("<b>", "other", ((0, 1.0), (1, 2.0)))], 0)
    assert drawing is not None
    assert "<script>" not in drawing
    assert parsed(drawing).get("aria-label") == "</svg><script>"


def test_heat_map_has_a_cell_for_each_rank_and_round() -> None:
    """Ranks by rounds; the guilty rank's cell of the faulty round is framed and says what it saw."""
    past_rounds = history(past.log(), story.incident())
    assert past_rounds is not None
    cells = [e for e in parsed(heat_map(past_rounds)).iter() if "cell" in e.get("class", "").split()]
    assert len(cells) == 2 * 12
    (named,) = [e for e in cells if "named" in e.get("class", "")]
    assert "own" in named.get("class", "")
    assert "rank 1, round 7" in "".join(named.itertext())


def test_curves_of_few_ranks_are_each_ranks_own() -> None:
    """Two ranks have a line each; loss, gradient, norm and scale are drawn."""
    past_rounds = history(past.log(), story.incident())
    assert past_rounds is not None
    drawn = {curve.title: curve for curve in curves(past_rounds)}
    assert list(drawn) == ["loss", "largest gradient contributed", "norm of the reduced gradients", "loss scale"]
    assert [label for label, _ in drawn["loss"].legend] == ["rank 0", "rank 1"]


def test_curves_tell_ranks_apart_where_all_are_suspects() -> None:
    """Red marks suspects among others; where every rank is one, each line has a colour of its own."""
    past_rounds = history(past.log(), story.incident(suspect_ranks=(0, 1)))
    assert past_rounds is not None
    assert [style for _, style in curves(past_rounds)[0].legend] == ["other o0", "other o1"]


def test_curves_of_many_ranks_are_suspects_and_median() -> None:
    """Beyond eight ranks the others are one line, their median."""
    incident = story.incident(world_size=40)
    past_rounds = history(past.log(world_size=40), incident)
    assert past_rounds is not None
    assert len(past_rounds.all_ranks) > LINES_PER_RANK
    assert [label for label, _ in curves(past_rounds)[0].legend] == ["median of the other ranks", "rank 1"]


@pytest.mark.parametrize("counts", [[], [0, 0], [1], [5, 0, 7], [10**12, 1]])
def test_histogram_is_well_formed(counts: list[int]) -> None:
    """Any counts give a drawing whose bars stay inside it."""
    bars = [e for e in parsed(histogram(counts, -1.0, 1.0)).iter() if e.get("class") == "bar"]
    assert all(0 <= float(bar.get("y", "-1")) <= 72 for bar in bars)


def test_picture_is_a_png_that_unpacks() -> None:
    """The data URI holds a PNG of the right size whose checksums and pixels are as they should be."""
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    raw = base64.b64decode(data_uri(pixels).removeprefix("data:image/png;base64,"))
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    place, unpacked = 8, b""
    while place < len(raw):
        (length,) = struct.unpack_from(">I", raw, place)
        kind, content = raw[place + 4 : place + 8], raw[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", raw, place + 8 + length)[0] == zlib.crc32(kind + content)
        if kind == b"IHDR":
            assert struct.unpack_from(">II", content) == (5, 4)
        unpacked = zlib.decompress(content) if kind == b"IDAT" else unpacked
        place += 12 + length
    rows = np.frombuffer(unpacked, np.uint8).reshape(4, 1 + 15)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:].reshape(4, 5, 3) == pixels).all()


def test_nonfinite_pixels_have_colours_of_their_own() -> None:
    """NaN and infinity are not drawn as black or white."""
    drawn = picture(np.array([[0.0, NAN], [INF, 1.0]]), 0.0, 1.0)
    assert tuple(drawn[0, 1]) == NAN_COLOUR
    assert tuple(drawn[1, 0]) == INF_COLOUR
    assert tuple(drawn[0, 0]) == (0, 0, 0)
    assert tuple(drawn[1, 1]) == (255, 255, 255)


@pytest.mark.parametrize("shape", [(1, 4096), (4096, 3000), (64, 64, 3), (20, 20, 4), (9, 9, 1), (1, 1)])
def test_pictures_stay_small(shape: tuple[int, ...]) -> None:
    """Whatever the tensor's size, no side is longer than the page can use."""
    drawn = picture(np.zeros(shape, np.float16), 0.0, 0.0)
    assert max(drawn.shape[:2]) <= MAX_SIDE
    assert drawn.shape[2] == 3
