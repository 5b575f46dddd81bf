"""How much fits: the room of a prompt and the budget of a reply. Pure."""

from __future__ import annotations

from dsv4nb.errors import PromptTooLong

SLACK = 96  # positions kept free behind a reply for rows that are written provisionally


def room(max_seq: int) -> int:
    """Return the tokens of the longest prompt that is taken."""
    return max_seq - SLACK - 1


def budget(n_prompt: int, max_new: int, max_seq: int) -> int:
    """Return how many tokens a reply may have, at least one.

    Raises:
        PromptTooLong: the prompt leaves no room.
    """
    if n_prompt > room(max_seq):
        raise PromptTooLong(n_prompt, max_seq, SLACK)
    return max(1, min(max_new, max_seq - SLACK - n_prompt))
