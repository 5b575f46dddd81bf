"""The protocol's fixed texts, by hash."""

from __future__ import annotations

import hashlib

import pytest

from dsv4nb.encoding import constants

SHA256 = {
    "TOOLS_BLOCK": "859cd6d20fe3ce513d7cb53c88944f87a860560c6d001d910376e1d9857d0889",
    "RESPONSE_FORMAT_PREFIX": "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112",
    "EFFORT_ABSOLUTE": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
    "EFFORT_BEYOND": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
}


@pytest.mark.parametrize("name", sorted(SHA256))
def test_a_fixed_text_is_byte_exact(name: str) -> None:
    assert hashlib.sha256(getattr(constants, name).encode()).hexdigest() == SHA256[name]
