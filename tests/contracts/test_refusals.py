"""Every way in which a request is refused: class, code, argument, words, and not one call of the engine."""

from __future__ import annotations

import ast
import itertools
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

import dsv4nb
from dsv4nb.errors import (
    ChatBusy,
    Dsv4Error,
    EncodingError,
    PromptEmpty,
    PromptOverCeiling,
    PromptTooLong,
    RequestError,
)
from dsv4nb.model import Model
from dsv4nb.testing.fake_engine import FakeEngine
from dsv4nb.testing.fake_model import fake_model

PACKAGE = Path(dsv4nb.__file__).parent
MAX_SEQ = 256
CODES: dict[type[Dsv4Error], tuple[str, bool]] = {
    RequestError: ("invalid_request", False),
    PromptEmpty: ("empty_prompt", False),
    PromptTooLong: ("context_length", False),
    PromptOverCeiling: ("context_length", False),
    EncodingError: ("invalid_messages", False),
    ChatBusy: ("chat_busy", True),
}

USER = {"role": "user", "content": "hi"}
DEEP: Any = "[" * 100_000


def tool(name: Any = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def typed(schema: Any, **parameters: Any) -> dict[str, Any]:
    """A demanded call of a tool with one parameter."""
    return {"tools": [tool(properties={"x": schema}, **parameters)], "tool_choice": "required"}


def declared(annotation: Any) -> dict[str, Any]:
    """A function with one annotated parameter."""

    def f(x): ...  # type: ignore[no-untyped-def]

    f.__annotations__ = {"x": annotation}
    return {"tools": [f]}


def reply(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **fields}


def calling(arguments: Any = "{}", **function: Any) -> dict[str, Any]:
    """A reply with a call."""
    return reply(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": arguments, **function}}])


def then(*messages: Any, **options: Any) -> dict[str, Any]:
    """A conversation whose last message asks."""
    return {"messages": [*messages, USER], **options}


def positional(x: int, /) -> None: ...


def variadic(*x: int) -> None: ...


class Shop:
    def sell(self) -> None: ...

    def __call__(self) -> None: ...


class Endless(TypedDict):
    more: Endless


class Lost(TypedDict):
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


class Broken:
    """Looks like pydantic's, and refers to what is not there."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"$ref": "#/$defs/absent"}

    @classmethod
    def model_validate(cls, value: Any) -> Any: ...


def ask_me() -> str:
    """Be a tool."""
    return ""


def drafting(**asked: Any) -> None:
    """Ask a model that has a drafter."""
    with fake_model("Hello there.", max_seq=MAX_SEQ, drafts=lambda before: [1] * 5) as model:
        model.submit("a", **asked)


R, E = RequestError, EncodingError
# what is asked, the error, the argument that it names, and what it says: the value met, the limit, the way out
REFUSED: list[tuple[dict[str, Any], type[Dsv4Error], str | None, tuple[str, ...]]] = [
    # keywords and sources
    ({"prompt": "a", "temprature": 1}, R, "temprature", ("'temprature'", "did you mean 'temperature'?")),
    ({"prompt": "a", "zzz": 1}, R, "zzz", ("'zzz'", "it has", "max_new")),
    ({}, R, "prompt", ("nothing is given", "exactly one of prompt, messages, prompt_ids")),
    ({"prompt": "a", "prompt_ids": [5]}, R, "prompt_ids", ("prompt and prompt_ids", "exactly one")),
    ({"prompt": 5}, R, "prompt", ("int", "must be text")),
    ({"prompt": ""}, PromptEmpty, "prompt", ("empty", "at least one character")),
    ({"prompt_ids": []}, PromptEmpty, "prompt_ids", ("empty", "at least one character")),
    ({"messages": ""}, PromptEmpty, "messages", ("empty", "at least one character")),
    ({"prompt_ids": "abc"}, R, "prompt_ids", ("a sequence of integers",)),
    ({"prompt_ids": [4096]}, R, "prompt_ids", ("4096", "0 to 4095")),
    ({"prompt_ids": [5], "tools": [tool()]}, R, "tools", ("no place in prompt_ids", "pass messages")),
    ({"prompt_ids": [5], "thinking": True}, R, "thinking", ("changes nothing", "leave it out")),
    # room
    ({"prompt_ids": [9] * 160}, PromptTooLong, "messages", ("160", "159", "256", "96", "larger max_seq")),
    ({"prompt_ids": [9] * 5, "max_prompt_tokens": 4}, PromptOverCeiling, "messages", ("5", "4", "raise")),
    # values
    ({"prompt": "a", "temperature": "hot"}, R, "temperature", ("'hot'", "must be a number")),
    ({"prompt": "a", "top_p": 1.5}, R, "top_p", ("1.5", "in (0, 1]")),
    ({"prompt": "a", "spec": True}, R, "spec", ("the checkpoint has no drafter", "leave it out")),
    ({"prompt": "a", "spec_depth": 2}, R, "spec_depth", ("the checkpoint has no drafter", "leave it out")),
    ({"prompt": "a", "max_new": -1}, R, "max_new", ("-1", "at least 0")),
    ({"prompt": "a", "thinking": 1}, R, "thinking", ("1", "True or False")),
    ({"prompt": "a", "stop": 5}, R, "stop", ("stop is 5", "a list of texts")),
    ({"prompt": "a", "temperature": 10**400}, R, "temperature", ("too large",)),
    ({"prompt": "a", "effort": 7}, R, "effort", ("effort is 7", "must be text")),
    ({"prompt": "a", "tool_choice": 7}, R, "tool_choice", ("tool_choice is 7", "text or a mapping")),
    ({"prompt": "a", "regex": "\ud800"}, R, "regex", ("half a surrogate pair",)),
    ({"prompt": "a", "stop": [""]}, R, "stop", ("''", "at least one character")),
    ({"prompt": "a", "stop_token_ids": [1.5]}, R, "stop_token_ids", ("a sequence of integers",)),
    ({"prompt": "a", "logprobs": 21}, R, "logprobs", ("21", "at most 20")),
    ({"prompt": "a", "logit_bias": 5}, R, "logit_bias", ("5", "mapping of ids")),
    ({"prompt": "a", "logit_bias": {5: "x"}}, R, "logit_bias", ("'x'", "a number in", "-inf to ban")),
    ({"prompt": "a", "logit_bias": {4096: 1.0}}, R, "logit_bias", ("4096", "0 to 4095")),
    ({"prompt": "a", "system": 5}, R, "system", ("int", "must be text")),
    (then({"role": "system", "content": "x"}, system="y"), R, "system", ("begin with a system", "leave out")),
    ({"prompt": "a", "effort": "high"}, R, "effort", ("'high'", "thinking is off", "thinking=True")),
    ({"prompt": "a", "thinking": True, "effort": "bogus"}, E, "messages", ("'bogus'", "none, minimal, low", "max")),
    # messages
    ({"messages": 5}, E, "messages", ("int", "text or a list")),
    ({"messages": []}, E, "messages", ("empty", "at least one message")),
    ({"messages": [{"role": "system", "content": "x"}]}, E, "messages", ("message 0", "add a user message")),
    ({"messages": [USER, reply()]}, E, "messages", ("message 1", "finished reply", "prefix=True")),
    (then("q"), E, "messages", ("message 0", "must be an object, not str")),
    (then({"role": "chef"}), E, "messages", ("message 0", "'chef'", "one of system, developer, user")),
    (then(USER, {"role": "system", "content": "x"}), E, "messages", ("message 1", "first", "Put it in front")),
    (then({"role": "user", "content": 3}), E, "messages", ("message 0", "text or a list of parts, not int")),
    (then({"role": "user", "content": ["a"]}), E, "messages", ("part 0", "an object with a 'type'")),
    (then({"role": "user", "content": [{"type": "image_url"}]}), E, "messages", ("part 0", "'image_url'", "text only")),
    (then({"role": "user", "content": [{"type": "text"}]}), E, "messages", ("part 0", "must have a 'text', not null")),
    (then({"role": "user", "content": "a\ud800"}), E, "messages", ("message 0", "surrogate", "character 1")),
    (then({"role": "tool", "tool_call_id": 3, "content": "x"}), E, "messages", ("tool_call_id", "text, not int")),
    (then(reply(tool_calls={})), E, "messages", ("message 0", "a list, not dict")),
    (then(reply(prefix="yes")), E, "messages", ("message 0", "true or false, not str")),
    (then(reply(prefix=True)), E, "messages", ("message 0", "only the last message")),
    (then(reply(tool_calls=["f"])), E, "messages", ("tool call 0", "an object with a 'function'")),
    (then(reply(tool_calls=[{"type": "custom", "function": {}}])), E, "messages", ("'custom'", "only 'function'")),
    (then(calling(name=3)), E, "messages", ("tool call 0", "the name must be text, not int")),
    (then(calling(DEEP)), E, "messages", ("message 0", "nested too deeply")),
    (then(calling({"a": {1}})), E, "messages", ("message 0", "cannot be written as JSON", "set")),
    # tools
    ({"prompt": "a", "tools": "f"}, R, "tools", ("str", "must be a list", "tools=[f]")),
    ({"prompt": "a", "tools": [5]}, R, "tools", ("a function or a schema, not int",)),
    ({"prompt": "a", "tools": [{}]}, R, "tools", ("tool 0", "with a 'function'")),
    ({"prompt": "a", "tools": [{**tool(), "type": "x"}]}, R, "tools", ("tool 0", "'x'", "only 'function'")),
    ({"prompt": "a", "tools": [tool('a"')]}, R, "tools", ("tool 0", "'a\"'", "one line of text")),
    ({"prompt": "a", "tools": [tool(), tool()]}, R, "tools", ("two tools", "'f'", "rename one")),
    ({"prompt": "a", "tools": [Shop]}, R, "tools", ("Shop is a class", "pass a function")),
    ({"prompt": "a", "tools": [Shop()]}, R, "tools", ("Shop has no name", "write a function around it")),
    ({"prompt": "a", "tools": [lambda: 0]}, R, "tools", ("a lambda has no name", "with def")),
    ({"prompt": "a", "tools": [Shop.sell]}, R, "tools", ("sell()", "pass it as object.sell")),
    ({"prompt": "a", "tools": [max]}, R, "tools", ("max() does not tell its parameters", "write a function around it")),
    ({"prompt": "a", "tools": [positional]}, R, "tools", ("'x' of positional()", "remove the '/'")),
    ({"prompt": "a", "tools": [variadic]}, R, "tools", ("'x' of variadic()", "make it one parameter")),
    ({"prompt": "a", **declared("Nowhere")}, R, "tools", ("f()", "'Nowhere'", "defined at the top level")),
    ({"prompt": "a", **declared(bytes)}, R, "tools", ("'x' of f()", "bytes", "annotate it as str")),
    ({"prompt": "a", **declared(Endless)}, R, "tools", ("another Endless", "leave its annotation out")),
    ({"prompt": "a", **declared(Lost)}, R, "tools", ("Lost", "'Nowhere'", "defined at the top level")),
    ({"prompt": "a", **declared(Literal[b"x"])}, R, "tools", ("'x' of f()", "b'x'", "JSON cannot carry")),
    ({"prompt": "a", **declared(Broken)}, R, "tools", ("'x' of f()", "#/$defs/absent")),
    # formats and choices
    ({"prompt": "a", "regex": ""}, R, "regex", ("''", "at least one character")),
    ({"prompt": "a", "regex": "a", "response_format": {"type": "json_object"}}, R, "regex", ("both", "one of them")),
    ({"prompt": "a", "response_format": 5}, R, "response_format", ("must be an object, not int",)),
    ({"prompt": "a", "response_format": {"type": "jsn_object"}}, R, "response_format", ("did you mean 'json_object'",)),
    ({"prompt": "a", "response_format": {"type": "xml"}}, R, "response_format", ("'xml'", "one of text, json_object")),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, R, "response_format", ("lacks its schema", "pass {")),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "schema": 5}},
        R,
        "response_format",
        ("schema must be an object, not int",),
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "schema": {"a": {1}}}},
        R,
        "response_format",
        ("cannot be written as JSON", "set"),
    ),
    ({"prompt": "a", "tool_choice": "required"}, R, "tool_choice", ("without tools", "pass tools=")),
    ({"prompt": "a", "tools": [tool()], "tool_choice": "al"}, R, "tool_choice", ("'al'", "auto")),
    ({"prompt": "a", "tools": [tool()], "tool_choice": {}}, R, "tool_choice", ("{}", "one of auto, none, required")),
    (
        {"prompt": "a", "tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        R,
        "tool_choice",
        ("'g'", "it must be one of f"),
    ),
    (
        {"prompt": "a", "tools": [tool()], "tool_choice": "required", "regex": "a"},
        R,
        "tool_choice",
        ("demands a call and regex a text", "drop one"),
    ),
    (
        {"messages": [USER, reply(prefix=True)], "regex": "a"},
        R,
        "regex",
        ("continued cannot be constrained", "leave out prefix=True"),
    ),
    # grammars
    ({"prompt": "a", "regex": "("}, R, "regex", ("the regex cannot be enforced", "unclosed group")),
    ({"prompt": "a", "regex": "a\\"}, R, "regex", ("'a\\\\'", "half an escape")),
    ({"prompt": "a", **typed({"type": "wrong"})}, R, "tools", ("'x' of the tool 'f'", "wrong")),
    ({"prompt": "a", **typed({"type": "string", "minLength": "2"})}, R, "tools", ("'minLength'", "'2'", "of type int")),
]


# as above, through other doors; the model says one reply with a call
DOORS: list[tuple[Callable[[Model], object], type[Dsv4Error], str | None, tuple[str, ...]]] = [
    (lambda m: drafting(spec_window="slot@0.5"), R, "spec_window", ("'slot@0.5'", "('slot', tau)")),
    (lambda m: drafting(spec_window=("slot", 1.0)), R, "spec_tau", ("1.0", "in (0, 1)")),
    (lambda m: drafting(spec_window=("slot", 0.5, 5)), R, "spec_window", ("floor", "is 5", "0 to 4")),
    (lambda m: drafting(spec_depth=7), R, "spec_depth", ("is 7", "1 to 6 rows")),
    (lambda m: drafting(spec=False, spec_depth=2), R, "spec_depth", ("no effect with spec=False",)),
    (lambda m: drafting(spec_mode="block"), R, "spec_mode", ("'block'", "'exact' or 'rejection'")),
    (
        lambda m: drafting(spec_mode="rejection", sampler="inverse_cdf"),
        R,
        "spec_mode",
        ("'inverse_cdf' can draw once", "use sampler='gumbel'"),
    ),
    (lambda m: m.chat().submit(5), R, "text", ("must be text, not int",)),  # type: ignore[arg-type]
    (lambda m: m.chat().send(""), PromptEmpty, "text", ("at least one character",)),
    (lambda m: m.chat(approve=5), R, "approve", ("5", "a function of a call")),  # type: ignore[arg-type]
    (lambda m: m.chat(approve="maybe"), R, "approve", ("'maybe'", "a function of a call, or 'ask'")),  # type: ignore[arg-type]
    (lambda m: m.chat(tools=[ask_me], approve="ask").send("a"), R, "approve", ("wait for a person", "chat.submit()")),
    (lambda m: m.chat().approve("call_0"), R, "call", ("'call_0' does not wait", "waiting: none")),
    (lambda m: m.chat().attach(5, name="n"), R, "value", ("n is a int", "text, tables, arrays")),
    (lambda m: m.chat().attach("missing"), R, "value", ("'missing'", "pass name= too")),
    (lambda m: m.chat().detach("n"), R, "name", ("'n'", "attached: none")),
    (lambda m: m.chat().fork(1), R, "turn", ("turn is 1", "0 turns to keep")),
    (lambda m: m.chat(max_rounds=0), R, "max_rounds", ("0", "at least 1")),
    (lambda m: m.chat().send_results({"x": 1}), R, "results", ("results are of x", "waits for none")),
    (lambda m: m.render("a", response_format=5), E, "messages", ("must be an object, not int",)),
    (
        lambda m: m.render("a", response_format={"type": "xml"}),
        E,
        "messages",
        ("'xml'", "text, json_object or json_sc"),
    ),
]


def labels(cases: list[tuple[dict[str, Any], Any, Any, Any]]) -> list[str]:
    """Return names without addresses, the same in every process."""
    return [f"{i}-{re.sub(r' at 0x[0-9a-f]+', '', str(case[0]))[:50]}" for i, case in enumerate(cases)]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with fake_model("Hello there.", max_seq=MAX_SEQ) as made:
        yield made


def require_refusal(raised: Dsv4Error, error: type[Dsv4Error], param: str | None, words: tuple[str, ...]) -> None:
    assert type(raised) is error
    assert (raised.code, raised.retryable) == CODES[error]
    assert raised.param == param
    assert [word for word in words if word not in str(raised)] == [], str(raised)


@pytest.mark.parametrize(("asked", "error", "param", "words"), REFUSED, ids=labels(REFUSED))
def test_m18_m51_a_refusal_is_classified_and_costs_no_engine_call(
    model: Model, asked: dict[str, Any], error: type[Dsv4Error], param: str | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as refused:
        model.submit(**asked)
    require_refusal(refused.value, error, param, words)
    assert isinstance(model.engine, FakeEngine) and not any(model.engine.calls.values())
    assert model.queue == []


@pytest.mark.parametrize(("call", "error", "param", "words"), DOORS, ids=[case[3][0] for case in DOORS])
def test_m18_m51_other_doors_refuse_alike(
    model: Model,
    call: Callable[[Model], object],
    error: type[Dsv4Error],
    param: str | None,
    words: tuple[str, ...],
) -> None:
    with pytest.raises(error) as refused:
        call(model)
    require_refusal(refused.value, error, param, words)
    assert isinstance(model.engine, FakeEngine) and not any(model.engine.calls.values())


# one fault of each rule, in the order in which they are checked
RULES: list[tuple[str, dict[str, Any]]] = [
    ("temprature", {"temprature": 1}),
    ("top_p", {"top_p": 7}),
    ("logit_bias", {"logit_bias": {4096: 1.0}}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("max_new", {"max_new": -1}),
    ("logprobs", {"logprobs": 99}),
    ("prompt_ids", {"prompt_ids": [5]}),
    ("tools", {"tools": [5]}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("system", {"system": 5}),
    ("effort", {"effort": "high"}),
    ("max_prompt_tokens", {"max_prompt_tokens": 0}),
]


def test_m51_the_first_failing_rule_wins(model: Model) -> None:
    for (param, first), (_, second) in itertools.combinations(RULES, 2):
        for asked in (first | second, second | first):
            with pytest.raises(RequestError) as refused:
                model.submit("a", **asked)
            assert refused.value.param == param, asked


def test_m51_the_room_is_checked_last(model: Model) -> None:
    for asked, param in (
        ({"max_prompt_tokens": 100}, "max_prompt_tokens allows 100"),
        ({"regex": "("}, "the regex cannot be enforced"),
        ({}, "at most 159 fit"),
    ):
        with pytest.raises(RequestError, match=param):
            model.submit("a " * 200, **asked)


# raise statements of these modules that no refusal of a request comes from, by function, and why
REQUEST_MODULES = (
    "config.py",
    "encoding/_grammar_lark.py",
    "encoding/_grammar_request.py",
    "encoding/policy.py",
    "encoding/render.py",
    "encoding/tools.py",
    "engine/processors.py",
    "session/annotations.py",
    "session/functions.py",
    "session/limits.py",
    "session/request.py",
)
ELSEWHERE = {
    "a call by the model, answered to the model": {"session/functions.py": {"_begin"}},
    "a run, see test_failures.py": {"engine/processors.py": {"_masked", "_require_a_choice"}},
    "a recipe, see test_grammar_request.py": {"encoding/_grammar_request.py": {"from_json"}},
    "a default that JSON cannot carry is left out": {"session/annotations.py": {"_plain"}},
    "policy.py and functions.py refuse it before": {
        "encoding/_grammar_request.py": {"_functions"},
        "encoding/policy.py": {"_tools"},
        "encoding/render.py": {"render", "_text", "_body", "_user", "_result_text", "_tail"},
        "encoding/tools.py": {"declaration_pieces", "calls_block", "_items"},
    },
}


def raise_sites(module: str) -> dict[tuple[int, int], str]:
    """Return the lines of each statement that raises something new, and the function it stands in."""
    sites: dict[tuple[int, int], str] = {}
    for outer in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(outer):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call | ast.Name):
                    sites[node.lineno, node.end_lineno or node.lineno] = outer.name  # the innermost comes last
    return sites


def test_m18_every_raise_of_a_refusal_is_in_the_tables(model: Model) -> None:
    calls: list[Callable[[], object]] = [
        *(lambda asked=case[0]: model.submit(**asked) for case in REFUSED),
        *(lambda call=case[0]: call(model) for case in DOORS),
    ]
    raised: set[tuple[str, int]] = set()
    for call in calls:
        with pytest.raises(Dsv4Error) as refused:
            call()
        frames = [
            (Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(refused.value.__traceback__)
        ]
        path, line = [(path, line) for path, line in frames if path.is_relative_to(PACKAGE)][-1]
        raised.add((path.relative_to(PACKAGE).as_posix(), line))
    exempt = {
        (module, function) for where in ELSEWHERE.values() for module, names in where.items() for function in names
    }
    missing, needless = [], set(exempt)
    for module in REQUEST_MODULES:
        for (start, end), function in raise_sites(module).items():
            if any((module, line) in raised for line in range(start, end + 1)):
                continue
            needless.discard((module, function))
            if (module, function) not in exempt:
                missing.append(f"{module}:{start} in {function}")
    assert (missing, needless) == ([], set())
