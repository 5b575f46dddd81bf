from __future__ import annotations

import pytest

from dsv4nb.errors import PromptTooLong
from dsv4nb.session.limits import SLACK, budget, room


def test_m49_the_slack_is_96() -> None:
    assert SLACK == 96
    assert room(256) == 159


@pytest.mark.parametrize(
    ("n_prompt", "max_new", "tokens"),
    [(159, 500, 1), (159, 0, 1), (158, 500, 2), (1, 500, 159), (1, 7, 7), (1, 0, 1)],
)
def test_m50_a_reply_fits_behind_the_prompt(n_prompt: int, max_new: int, tokens: int) -> None:
    assert budget(n_prompt, max_new, 256) == tokens


def test_m49_h29_a_prompt_without_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"160 tokens; at most 159 fit \(max_seq 256 less 96") as refused:
        budget(160, 1, 256)
    assert refused.value.code == "context_length"
