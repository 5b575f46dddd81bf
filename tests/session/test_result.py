from __future__ import annotations

from collections.abc import Callable
from typing import Any

MakeModel = Callable[..., Any]


def test_a30_a_result_is_its_events_joined(make_model: MakeModel) -> None:
    model = make_model("I think.</think>Yes 😀.")
    result = model.generate("hi", thinking=True)
    assert (result.reasoning, result.text, str(result)) == ("I think.", "Yes 😀.", "Yes 😀.")
    assert result.raw_text == "I think.</think>Yes 😀."
    assert result.all_ids == (*model.tokenize("hi", thinking=True), *result.ids)
    assert result.messages[-1] == {"role": "assistant", "content": "Yes 😀.", "reasoning_content": "I think."}


def test_a_prompt_of_ids_has_no_messages(make_model: MakeModel) -> None:
    assert make_model().generate(prompt_ids=[9]).messages == ()


def test_a_continued_reply_becomes_one_message(make_model: MakeModel) -> None:
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,", "prefix": True}]
    result = make_model(" yes.").generate(messages=asked)
    assert result.text == " yes."
    assert result.messages == (asked[0], {"role": "assistant", "content": "Well, yes."})


def test_a_block_that_departs_from_the_format_is_read_and_reported(make_model: MakeModel) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    # another spelling of the block, and no line breaks: the strict parser takes neither
    script = '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜function_calls>'
    result = make_model(script).generate("hi", tools=[tool])
    assert result.stop_reason == "tool_calls" and result.raw_text == script
    assert [(call.id, call.name, call.arguments) for call in result.tool_calls] == [("call_0", "f", "{}")]
    assert result.messages[-1]["tool_calls"][0]["id"] == "call_0"
    assert "malformed_opener" in result.problems
