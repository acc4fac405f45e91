"""Keys: fresh ones for a run, lasting ones for a standalone coordinator, and none that others can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from sentinel.coordinator.keys import KeysUnusable, ephemeral_keys, persistent_keys


def test_ephemeral_keys_are_new_each_time(tmp_path: Path) -> None:
    """Two coordinators share no key, and no secret shows in a representation."""
    first, second = ephemeral_keys(), ephemeral_keys()
    assert len({*first.model_dump().values(), *second.model_dump().values()}) == 10
    join = first.join("tcp://127.0.0.1:1", http=None, run_dir=tmp_path)
    for secret in (first.server_secret, first.client_secret, first.command_key):
        assert secret not in repr(first) + repr(join)
    assert first.server_secret not in join.model_dump_json()


def test_persistent_keys_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """The file is private and read again."""
    path = tmp_path / "coordinator.key"
    keys = persistent_keys(path)
    assert persistent_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A leaked secret must not be used further."""
    path = tmp_path / "coordinator.key"
    persistent_keys(path)
    path.chmod(0o640)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        persistent_keys(path)


def test_a_key_file_that_is_none_is_refused_without_showing_it(tmp_path: Path) -> None:
    """Torn files, pairs that do not match, symlinks and directories are each one line, without a secret in it."""
    path, keys = tmp_path / "coordinator.key", ephemeral_keys()
    mixed = keys.model_copy(update={"server_public": zmq.curve_keypair()[0].decode()})
    for text in ("", "{", "{}", mixed.model_dump_json()):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(KeysUnusable) as refused:
            persistent_keys(path)
        assert keys.server_secret not in str(refused.value)
        assert "\n" not in str(refused.value)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text(keys.model_dump_json())
    with pytest.raises(KeysUnusable, match="cannot be read"):
        persistent_keys(path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(KeysUnusable):
        persistent_keys(path)
