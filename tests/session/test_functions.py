from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import pytest

from dsv4nb.encoding.parse import parse_strict
from dsv4nb.encoding.policy import normalize
from dsv4nb.encoding.render import render
from dsv4nb.errors import RequestError
from dsv4nb.session.functions import Function, ToolOutcome, Toolset, function_of, tools_of
from dsv4nb.session.tool_text import LIMIT

if TYPE_CHECKING:  # what a function returns need not mean anything when it is declared
    from collections.abc import Mapping


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def weather(city: str, unit: Unit = Unit.C, days: int = 1) -> Mapping[str, Any]:
    """Tell the weather
    of a city.

    It is always fine.

    Args:
        city: name in English
        unit: of the temperature
    """
    return {"city": city, "unit": unit, "days": [f"day {i}" for i in range(days)]}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "name in English"},
                "unit": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                    "description": "of the temperature",
                    "default": "celsius",
                },
                "days": {"type": "integer", "default": 1},
            },
            "required": ["city"],
        },
    },
}
OPEN_FILE = {
    "type": "function",
    "function": {"strict": True, "name": "open_file", "parameters": {"properties": {"path": {}}, "type": "object"}},
}


def open_file(path: str, lines: tuple[int, int] = (1, 20), flags: dict[str, bool] | None = None) -> str:
    """Read lines of a file."""
    return f"{path} {lines} {flags}"


async def later(n: int) -> int:
    """Wait and double."""
    await asyncio.sleep(0.001)
    return 2 * n


class Shop:
    """Has prices."""

    def price(self, item: str) -> float:
        """Tell a price."""
        return len(item) / 2

    async def wait(self, item: str) -> str:
        """Tell a price later."""
        return item

    @classmethod
    def name(cls) -> str:
        """Tell its name."""
        return cls.__name__

    @staticmethod
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def __call__(self) -> None: ...


def untyped(x, y=2):  # type: ignore[no-untyped-def]
    return [x, y]


def nothing() -> None: ...


def positional(a: int, /, b: int) -> None: ...


def many(*values: int) -> None: ...


def named(**values: int) -> None: ...


def bytewise(data: bytes) -> None: ...


def lost(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class TestDeclaration:
    def test_signature_and_docstring_become_the_schema(self) -> None:
        function = function_of(weather)
        assert function.schema == WEATHER and function.name == "weather"
        # the model reads the keys in this order
        assert json.dumps(function.schema) == json.dumps(WEATHER)

    def test_without_annotations_and_docstring_anything_goes(self) -> None:
        parameters = {"type": "object", "properties": {"x": {}, "y": {"default": 2}}, "required": ["x"]}
        assert function_of(untyped).schema["function"] == {"name": "untyped", "parameters": parameters}
        parameters = {"type": "object", "properties": {}, "required": []}
        assert function_of(nothing).schema["function"] == {"name": "nothing", "parameters": parameters}

    @pytest.mark.parametrize(
        ("f", "names"),
        [
            (Shop().price, ["item"]),
            (Shop().wait, ["item"]),
            (Shop.name, []),
            (Shop().name, []),
            (Shop.add, ["a", "b"]),
            (later, ["n"]),
            (functools.lru_cache(Shop.add), ["a", "b"]),
            (functools.wraps(weather)(lambda *a, **k: None), ["city", "unit", "days"]),
        ],
        ids=lambda value: getattr(value, "__qualname__", ""),
    )
    def test_whatever_is_called_by_a_name_is_a_function(self, f: Callable[..., Any], names: list[str]) -> None:
        schema = function_of(f).schema["function"]
        assert schema["name"] == f.__name__ and schema["description"]
        assert list(schema["parameters"]["properties"]) == names

    @pytest.mark.parametrize(
        ("f", "said"),
        [
            (positional, r"^'a' of positional\(\) is positional-only and a model passes names; remove the '/'"),
            (many, r"^'values' of many\(\) collects values without names; make it one parameter, a list"),
            (named, r"^'values' of named\(\) collects values of any name; make it one parameter, a dict"),
            (bytewise, r"^'data' of bytewise\(\) is annotated bytes, which JSON cannot carry"),
            (lost, r"^the annotations of lost\(\) mean nothing: name 'Nowhere' is not defined; .* at the top level$"),
            (lambda x: x, "^a lambda has no name to be called by; write it with def$"),
            (functools.partial(weather, "Paris"), "^partial has no name to be called by; write a function around it"),
            (Shop(), "^Shop has no name to be called by; write a function around it"),
            (Shop, "^Shop is a class; pass a function that makes one$"),
            (Shop.price, r"^price\(\) is a method without its object; pass it as object.price$"),
            (max, r"^max\(\) does not tell its parameters; write a function around it with def$"),
            (len, r"^'obj' of len\(\) is positional-only"),
            (print, r"^'args' of print\(\) collects values"),
            (5, "^a tool must be a function or a schema, not int$"),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_what_a_model_cannot_call_is_refused_by_name(self, f: Any, said: str) -> None:
        with pytest.raises(RequestError, match=said) as refused:
            function_of(f)
        assert refused.value.param == "tools"

    @pytest.mark.parametrize("name", ['a"b', "a<b", "a>b", "a\nb", "a\u2028b", "", "\ud800"])
    def test_a_name_that_would_break_a_tag_is_refused(self, name: str) -> None:
        def f() -> None: ...

        f.__name__ = name
        with pytest.raises(RequestError, match='without ", < and >'):
            function_of(f)
        with pytest.raises(RequestError, match="tool 1 is called"):
            tools_of([OPEN_FILE, {"type": "function", "function": {"name": name}}])
        with pytest.raises(RequestError, match="a parameter of f is called"):
            tools_of([{"function": {"name": "f", "parameters": {"properties": {name: {}}}}}])

    @pytest.mark.parametrize("name", ["größe", "get-x.y", "a b", "名前"])
    def test_any_other_name_is_taken(self, name: str) -> None:
        assert tools_of([{"function": {"name": name}}]).schemas[0]["function"]["name"] == name


class TestToolset:
    def test_functions_and_schemas_keep_their_order_and_their_keys(self) -> None:
        tools = tools_of([OPEN_FILE, weather, function_of(later)])
        assert [schema["function"]["name"] for schema in tools.schemas] == ["open_file", "weather", "later"]
        assert list(tools.functions) == ["weather", "later"]
        assert all(isinstance(function, Function) for function in tools.functions.values())
        assert json.dumps(tools.schemas[:2]) == json.dumps([OPEN_FILE, WEATHER])
        assert tools_of(tools) is tools and tools_of(()) == Toolset()

    @pytest.mark.parametrize(
        ("tools", "said"),
        [
            ([weather, open_file, OPEN_FILE], "^two tools are called 'open_file'; rename one$"),
            (weather, r"^tools is function; it must be a list, such as tools=\[weather\]$"),
            (OPEN_FILE, "^tools is dict; it must be a list"),
            ("weather", "^tools is str; it must be a list"),
            ([weather, "later"], "^a tool must be a function or a schema, not str$"),
            ([{"name": "f"}], r"^tool 0 must be a function or an object with a 'function', not \['name'\]$"),
            ([{"type": "custom", "function": {"name": "f"}}], "^tool 0 is of type 'custom'; only 'function' is known$"),
            ([{"function": {}}], "^tool 0 is called None"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_anything_else_is_refused_by_name(self, tools: Any, said: str) -> None:
        with pytest.raises(RequestError, match=said) as refused:
            tools_of(tools)
        assert refused.value.param == "tools"


class TestCall:
    def test_arguments_arrive_as_annotated(self) -> None:
        outcome = tools_of([weather]).call("weather", '{"days": 2.0, "unit": "fahrenheit", "city": "Paris"}')
        content = '{"city": "Paris", "unit": "fahrenheit", "days": ["day 0", "day 1"]}'
        assert outcome == ToolOutcome(content=content)

    @pytest.mark.parametrize("arguments", ["{}", "", " \n"])
    def test_a_function_without_arguments_is_called(self, arguments: str) -> None:
        assert tools_of([nothing]).call("nothing", arguments) == ToolOutcome(content="null")

    @pytest.mark.parametrize(
        ("name", "arguments", "said"),
        [
            ("wether", "{}", "there is no tool wether; did you mean weather?"),
            ("zzz", "{}", "there is no tool zzz; there are weather, open_file"),
            ("open_file", "{}", "open_file cannot be run here"),
            ("weather", "[1]", "the arguments of weather must be a JSON object"),
            ("weather", "null", "the arguments of weather must be a JSON object"),
            ("weather", "[" * 200_000, "the arguments of weather are nested too deeply"),
            (
                "weather",
                '{"city": "Paris"',
                "the arguments of weather are not JSON: Expecting ',' delimiter: line 1 column 17 (char 16)",
            ),
            ("weather", "{}", "weather was not called: city is missing"),
            (
                "weather",
                '{"town": "Paris", "days": "2", "unit": "kelvin"}',
                "weather was not called: town is unknown; there are city, unit, days; city is missing; "
                'unit must be one of "celsius", "fahrenheit", not "kelvin"; days must be an integer, not "2"',
            ),
        ],
        ids=lambda value: value[:30],
    )
    def test_what_is_wrong_with_a_call_is_told_to_the_model(self, name: str, arguments: str, said: str) -> None:
        outcome = tools_of([weather, OPEN_FILE]).call(name, arguments)
        assert outcome == ToolOutcome(content=f"Error: {said}", error=said)

    def test_a_call_without_any_tools_says_so(self) -> None:
        assert Toolset().call("f", "{}").error == "there is no tool f; there is none"

    def test_what_is_shown_of_a_bad_argument_can_be_encoded(self) -> None:
        outcome = tools_of([weather]).call("weather", '{"\\ud800": 1, "city": "a"}')
        assert outcome.content.encode() and "? is unknown" in outcome.content

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ValueError("no such city"), "ValueError: no such city"),
            (KeyError("Paris"), "KeyError: 'Paris'"),
            (TimeoutError(), "TimeoutError"),
            (SystemExit(2), "SystemExit: 2"),
            (BaseException("a panic of compiled code"), "BaseException: a panic of compiled code"),
            (RequestError("tools within tools"), "RequestError: tools within tools"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_a_function_raises_is_an_outcome(self, error: BaseException, said: str) -> None:
        def broken(city: str) -> None:
            raise error

        outcome = tools_of([broken]).call("broken", '{"city": "Paris"}')
        assert (outcome.content, outcome.error) == (f"Error: {said}", said)
        assert outcome.exception is error and error.__traceback__ is not None
        assert "Traceback" not in outcome.content

    def test_even_an_error_that_cannot_be_printed(self) -> None:
        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError("not even that")

        def broken() -> None:
            raise Unprintable

        assert tools_of([broken]).call("broken", "{}").error == "Unprintable: it cannot be printed"

    def test_a_result_without_a_text_is_an_outcome(self) -> None:
        class Silent:
            def __repr__(self) -> str:
                raise RuntimeError("no text")

        def broken() -> Any:
            return Silent()

        assert tools_of([broken]).call("broken", "{}").content == "Error: RuntimeError: no text"

    def test_results_and_errors_have_a_length(self) -> None:
        def long(fails: bool) -> str:
            if fails:
                raise ValueError("a" * LIMIT)
            return "a" * (LIMIT + 1)

        tools = tools_of([long])
        assert tools.call("long", '{"fails": false}').content == "a" * LIMIT + "\n[1 more characters left out]"
        outcome = tools.call("long", '{"fails": true}')
        assert outcome.content.endswith("\n[19 more characters left out]")
        assert outcome.error is not None and outcome.error.endswith("\n[12 more characters left out]")

    def test_an_interrupt_is_no_outcome(self) -> None:
        def stopped() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tools_of([stopped]).call("stopped", "{}")
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(tools_of([stopped]).acall("stopped", "{}"))


class TestCoroutines:
    def test_they_are_awaited(self) -> None:
        tools = tools_of([later, Shop().wait, weather])
        assert tools.call("later", '{"n": 4}').content == "8"
        assert tools.call("wait", '{"item": "a"}').content == "a"

        async def all_of_them() -> list[str]:
            calls = [("later", '{"n": 4}'), ("wait", '{"item": "a"}'), ("weather", '{"city": "a"}'), ("later", "{}")]
            return [(await tools.acall(*call)).content for call in calls]

        expected = ["8", "a", '{"city": "a", "unit": "celsius", "days": ["day 0"]}']
        assert asyncio.run(all_of_them()) == [*expected, "Error: later was not called: n is missing"]

    def test_one_can_be_called_where_a_loop_is_running(self) -> None:
        async def cell() -> str:
            return tools_of([later]).call("later", '{"n": 1}').content

        before = threading.active_count()
        assert asyncio.run(cell()) == "2"
        assert threading.active_count() == before

    def test_what_one_raises_is_an_outcome(self) -> None:
        async def broken() -> None:
            await asyncio.sleep(0)
            raise ValueError("late")

        assert tools_of([broken]).call("broken", "{}").content == "Error: ValueError: late"
        assert asyncio.run(tools_of([broken]).acall("broken", "{}")).content == "Error: ValueError: late"

    def test_an_interrupt_cancels_one(self) -> None:
        ended: list[str] = []

        async def sleeper() -> None:
            try:
                await asyncio.sleep(30)
            finally:
                ended.append("cleaned up")

        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        before, started = threading.active_count(), time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            tools_of([sleeper]).call("sleeper", "{}")
        timer.join()
        assert ended == ["cleaned up"] and time.monotonic() - started < 5
        assert threading.active_count() == before

    def test_cancelling_the_await_cancels_one(self) -> None:
        async def sleeper() -> None:
            await asyncio.sleep(30)

        async def cell() -> None:
            task = asyncio.create_task(tools_of([sleeper]).acall("sleeper", "{}"))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cell())


class TestRoundTrip:
    def test_the_declaration_is_one_line_with_the_keys_in_order(self) -> None:
        schemas = tools_of([weather, OPEN_FILE]).schemas
        text = "".join(s.text for s in render(normalize("Hi", tools=schemas), revision="v0731", thinking=False))
        assert "\n".join(json.dumps(schema["function"]) for schema in (WEATHER, OPEN_FILE)) in text

    def test_c04_a_call_reaches_the_function_and_goes_back_unchanged(self) -> None:
        block = (
            '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="open_file">\n'
            '<｜DSML｜parameter name="path" string="true">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="flags" string="false">{"raw": true}</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="lines" string="false">[1, 20]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        )
        tools = tools_of([open_file])
        (call,) = parse_strict(block, thinking=False).tool_calls
        outcome = tools.call(call.name, call.arguments_json)
        assert outcome.content == "5 (1, 20) {'raw': True}"
        for arguments in (call.arguments_json, json.loads(call.arguments_json)):
            function = {"name": call.name, "arguments": arguments}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "Read it."},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "function": function}]},
                {"role": "tool", "tool_call_id": "call_0", "content": outcome.content},
            ]
            rendered = render(normalize(messages, tools=tools.schemas), revision="v0731", thinking=False)
            text = "".join(segment.text for segment in rendered)
            assert f"{block}<｜end▁of▁sentence｜><｜User｜><tool_result>{outcome.content}</tool_result>" in text

    def test_c05_a_declared_function_keeps_the_reasoning(self) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "5", "reasoning_content": "add"},
            {"role": "user", "content": "double it"},
        ]
        tools = tools_of([weather]).schemas
        rendered = render(normalize(messages, tools=tools), revision="v0731", thinking=True)
        tail = (
            "<｜User｜>2+3?<｜Assistant｜><think>add</think>5<｜end▁of▁sentence｜>"
            "<｜User｜>double it<｜Assistant｜><think>"
        )
        assert "".join(segment.text for segment in rendered).endswith(tail)


def test_a_literal_is_checked() -> None:
    def pick(side: Literal["left", "right"]) -> str:
        """Pick."""
        return side

    # what a local function names must be found at the top level
    assert tools_of([pick]).call("pick", '{"side": "left"}').content == "left"
    assert tools_of([pick]).call("pick", '{"side": "up"}').error == (
        'pick was not called: side must be one of "left", "right", not "up"'
    )
