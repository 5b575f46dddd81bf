from __future__ import annotations

import pytest

from dsv4nb.stream.facts import duration, run_facts
from dsv4nb.testing.fake_model import fake_model


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.00004, "0.0 ms"), (0.0034, "3.4 ms"), (0.243, "243 ms"), (9.9, "9900 ms"), (75, "75.0 s")]
)
def test_a_time_is_a_short_number(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_phases_of_a_run_follow_one_another() -> None:
    with fake_model("one two three", delay_s=0.002) as model:
        chat = model.chat(temperature=0)
        first, second = chat.send("Hi").done, chat.send("Hi again").done
    facts = run_facts(second)
    assert [phase.name for phase in facts.phases] == ["Prepare", "Queue", "Prefill", "First token", "Decode"]
    for before, after in zip(facts.phases, facts.phases[1:], strict=False):
        assert after.start_s == pytest.approx(before.start_s + before.seconds)
    assert facts.phases[0].start_s == 0 and facts.phases[-1].seconds > 0.004
    assert (
        facts.choice == "greedy" and facts.first_token == f"first token {duration(second.timings.first_token_s or 0)}"
    )
    notes = {phase.name: phase.note for phase in facts.phases}
    computed = second.n_prompt - second.n_cached
    assert (notes["Prefill"], notes["Decode"]) == (f"{computed} tokens, {second.n_cached} cached", "3 tokens")
    assert run_facts(first).phases[2].note == f"{first.n_prompt} tokens"


def test_what_did_not_happen_is_no_phase() -> None:
    with fake_model("one", delay_s=0.05) as model:
        running = model.submit("Hi")
        waiting = model.submit("Hi", temperature=1.0, seed=3)
        waiting.cancel()
        running.wait()
    facts = run_facts(waiting.result().done)
    assert [phase.name for phase in facts.phases] == ["Prepare"]
    assert (facts.choice, facts.first_token) == ("sampled, seed 3", "")
    assert facts.jsonable()["rows"][0][:2] == ["Prepare", ""]
