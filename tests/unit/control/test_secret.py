"""What is signed with the secret of the job is heard; everything else is ignored, counted and written over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lightning_distplus.control import secret as secret_module
from lightning_distplus.control.secret import Secret, SignedStore, escaped, leave_secret, secrets_here, words_of

SECRET = Secret("only we know")


@pytest.mark.parametrize("forged", [b"", b"junk", Secret("another").seal("key", b"5"), SECRET.seal("other key", b"5")])
def test_a_value_that_is_not_signed_for_its_key_is_counted_and_claimed_over(forged: bytes) -> None:
    secret, store = Secret("only we know"), HashStore()
    store.set("key", forged)
    signed = SignedStore(store, secret)
    assert signed.read("key") is None
    assert secret.num_ignored == 1
    assert signed.claim("key", b"ours") == b"ours"
    assert signed.claim("key", b"later") == b"ours"
    assert signed.read("key") == b"ours"


def test_entries_are_found_between_what_strangers_write_and_each_is_checked_once() -> None:
    secret = Secret("only we know")
    one, two, reader = (secret.entries("key") for _ in range(3))
    first, second = one.entry(b"first"), two.entry(b"second")
    forged = Secret("another").entries("key").entry(b"forged")
    copied = first[:4] + b"\xff\xff" + bytes(30)
    altered = one.entry(b"gate 1")[:-1] + b"2"  # under the signature of what was said
    data = b"junk" + first + forged + copied + altered + second
    assert reader.read(data) == [b"first", b"second"]
    ignored = secret.num_ignored
    assert ignored > 0
    assert reader.read(data) == [b"first", b"second"]
    assert secret.num_ignored == ignored
    assert reader.read(second) == [b"second"]  # written anew


def test_control_characters_of_a_peer_are_shown() -> None:
    assert escaped("\x1b[31mred\r\x9b1m\u202eabc\n\tend") == "\\x1b[31mred\\r\\x9b1m\\u202eabc\n\tend"
    assert words_of('{"a\\u001b": ["\\u0007", 1, null]}') == {"a\\x1b": ["\\x07", 1, None]}


def test_what_is_signed_for_one_attempt_does_not_hold_in_another() -> None:
    first, second = SECRET.within("attempt 0"), SECRET.within("attempt 1")
    assert second.open("key", first.seal("key", b"5")) is None
    assert Secret("only we know").within("attempt 0").open("key", first.seal("key", b"5")) == b"5"


def test_a_message_that_is_read_often_counts_once() -> None:
    secret = Secret("only we know")
    for _ in range(3):
        secret.within("attempt 0").open("key", b"junk")
    assert secret.num_ignored == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(secret_module, "_FOLDERS", (str(tmp_path),))
    return tmp_path


def test_a_secret_that_is_left_is_found_and_only_its_user_can_read_it(folder: Path) -> None:
    secret, path = leave_secret()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [one.name for one in secrets_here()] == [secret.name]
    os.utime(path, (0, 0))
    later, _ = leave_secret()
    assert [one.name for one in secrets_here()] == [later.name]  # the old one is forgotten


def test_a_file_that_others_may_write_or_that_leads_elsewhere_is_no_secret(folder: Path) -> None:
    _, path = leave_secret()
    path.chmod(0o644)
    (path.parent / "secret-link").symlink_to(path)
    assert list(secrets_here()) == []
    path.chmod(0o600)
    path.parent.chmod(0o755)
    assert list(secrets_here()) == []
    with pytest.raises(PermissionError):
        leave_secret()
