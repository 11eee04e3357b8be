"""What is signed with the secret of the job is heard; everything else is ignored, counted and written over."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from lightning_distplus.control.secret import Secret, SignedStore, escaped, words_of

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
    data = b"junk" + first + forged + copied + second
    assert reader.read(data) == [b"first", b"second"]
    ignored = secret.num_ignored
    assert ignored > 0
    assert reader.read(data) == [b"first", b"second"]
    assert secret.num_ignored == ignored
    assert reader.read(second) == [b"second"]  # written anew


def test_control_characters_of_a_peer_are_shown() -> None:
    assert escaped("\x1b[31mred\r\x9b1m\u202eabc\n\tend") == "\\x1b[31mred\\r\\x9b1m\\u202eabc\n\tend"
    assert words_of('{"a\\u001b": ["\\u0007", 1, null]}') == {"a\\x1b": ["\\x07", 1, None]}
