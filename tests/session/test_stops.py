from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from dsv4nb.session.stops import StopScanner


def scanned(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = "".join(scanner.feed(piece) for piece in pieces)
    return shown + ("" if scanner.hit else scanner.flush()), scanner.hit


CASES = [
    (["END"], "The END of it", "The ", "END"),
    (["END"], "The ENjoy", "The ENjoy", None),
    (["ab", "abc"], "xabcd", "x", "ab"),  # completed first
    (["abc", "b"], "xabcd", "xa", "b"),
    (["xab", "b"], "xabcd", "", "xab"),  # completed together: the longest
    (["aab"], "aaab", "a", "aab"),
    (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    (["😀｜"], "a😀😀｜b", "a😀", "😀｜"),
    ([], "anything", "anything", None),
    ([""], "anything", "anything", None),
]


@pytest.mark.parametrize(("stops", "text", "shown", "hit"), CASES, ids=[repr(c[1]) for c in CASES])
def test_m57_every_cut_gives_the_same(stops: list[str], text: str, shown: str, hit: str | None) -> None:
    for n in range(min(len(text), 4)):
        for places in itertools.combinations(range(1, len(text)), n):
            cuts = [0, *places, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
            assert scanned(stops, pieces) == (shown, hit), pieces
    assert scanned(stops, list(text)) == (shown, hit)


def test_m58_no_part_of_a_stop_is_ever_shown() -> None:
    stop = "<" + "".join(chr(97 + i % 26) for i in range(198)) + ">"
    text = "before " + stop + " after"
    pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
    assert len(pieces) > 40
    scanner = StopScanner([stop])
    shown = ""
    for piece in pieces:
        shown += scanner.feed(piece)
        assert "before ".startswith(shown)
    assert shown == "before " and scanner.hit == stop


def test_what_is_shown_is_never_more_than_what_may_be() -> None:
    random_ = random.Random(3)
    for _ in range(300):
        text = "".join(random_.choice("ab") for _ in range(12))
        stops = ["".join(random_.choice("ab") for _ in range(random_.randint(1, 4))) for _ in range(2)]
        whole = scanned(stops, [text])
        pieces, rest = [], text
        while rest:
            n = random_.randint(1, 3)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert scanned(stops, pieces) == whole, (stops, pieces)
