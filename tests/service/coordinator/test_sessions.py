"""Sessions of browsers: bounded in time and number, and cookies that stay where they belong."""

from __future__ import annotations

from sentinel.coordinator.sessions import LIFETIME_SECONDS, MAX_SESSIONS, Sessions, cookie_header


def test_a_session_ends_by_itself() -> None:
    """Half a day after sign-in the name is worth nothing."""
    now = 1000.0
    sessions = Sessions(lambda: now)
    name = sessions.open()
    assert name in sessions
    now += LIFETIME_SECONDS + 1
    assert name not in sessions


def test_the_oldest_session_makes_room() -> None:
    """However often somebody signs in, memory is bounded and the newest sessions stand."""
    sessions = Sessions()
    names = [sessions.open() for _ in range(MAX_SESSIONS + 5)]
    assert [name in sessions for name in (names[0], names[4], names[5], names[-1])] == [False, False, True, True]
    assert len(set(names)) == len(names)


def test_what_is_no_name_is_no_session() -> None:
    """No cookie at all, an empty one and a guessed one open nothing."""
    sessions = Sessions()
    sessions.open()
    assert not [name for name in (None, "", "guessed") if name in sessions]


def test_cookies_are_out_of_reach() -> None:
    """No script and no other site gets the cookie, and over TLS it never travels without."""
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie_header("x", secure=False).split("; "))
    assert "Secure" in cookie_header("x", secure=True).split("; ")
