"""Sums of a round's collectives add up, with the bound of what rounding may do to them."""

from __future__ import annotations

import pytest

from sentinel_agent.fingerprint import Audit


def test_audits_of_a_round_add_up() -> None:
    """The bound, elements times magnitude, is that of each collective: a large layer's does not hide what a small one lost."""
    both = Audit(0, 1.0, 2.0, 1000, 0.5, "SUM", "float16").plus(Audit(1, 3.0, 6.0, 10, 8.0, "SUM", "float16"))
    assert (both.index, both.sum_in, both.sum_out, both.numel) == (1, 4.0, 8.0, 1010)
    assert both.numel * both.absmax == pytest.approx(1000 * 0.5 + 10 * 8.0)


def test_audits_of_another_kind_do_not_mix() -> None:
    """The tolerance is one dtype's: of two, the later collective's sums are kept."""
    later = Audit(1, 3.0, 6.0, 10, 8.0, "SUM", "float32")
    assert Audit(0, 1.0, 2.0, 1000, 0.5, "SUM", "float16").plus(later) is later
