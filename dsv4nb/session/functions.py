"""Python functions as tools: signature and docstring declare one, the JSON arguments of a call run it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import inspect
import json
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.session.annotations import EMPTY, Member, members_of
from dsv4nb.session.docstrings import read_docstring
from dsv4nb.session.shapes import Members, Misfit
from dsv4nb.session.tool_text import result_text

JOIN_S = 2.0  # an interrupted coroutine has this long to clean up

# a name stands between quotes in a tag, without any escape
_NAME = re.compile(r'[^"<>\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]+')
# these end more than the call; other exceptions do not, not even a panic of compiled code, which is no Exception
_PASSING = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
_UNNAMED = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only and a model passes names; remove the '/' behind it",
    inspect.Parameter.VAR_POSITIONAL: "collects values without names; make it one parameter, a list",
    inspect.Parameter.VAR_KEYWORD: "collects values of any name; make it one parameter, a dict, or name them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A Python function that a model may call.

    Attributes:
        call: the function; it may be a coroutine function.
        schema: its declaration, OpenAI-shaped.
        members: its parameters.
    """

    name: str
    call: Callable[..., Any]
    schema: dict[str, Any]
    members: Members


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What a call came to.

    Attributes:
        content: what the model reads.
        error: why there is no result, None when there is one.
        exception: what the function raised, for a person; None when it was not run or returned.
    """

    content: str
    error: str | None = None
    exception: BaseException | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of a conversation, in the order in which they were given.

    Attributes:
        declared: a schema for each.
        functions: those that can be called from here, by name.
    """

    declared: tuple[dict[str, Any], ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The declarations that the model gets, OpenAI-shaped, their keys in the given order."""
        return list(self.declared)

    def call(self, name: str, arguments_json: str) -> ToolOutcome:
        """Run a tool on this thread; what is wrong with the call, or raised by the function, is an outcome too.

        A coroutine function runs in an event loop on a thread of its own, as this thread may have one running. An
        interrupt is raised.
        """
        try:
            value = self._begin(name, arguments_json)
            return ToolOutcome(content=result_text(_finished(value) if inspect.isawaitable(value) else value))
        except _PASSING:
            raise
        except BaseException as error:
            return _failure(error)

    async def acall(self, name: str, arguments_json: str) -> ToolOutcome:
        """Run a tool as `call` does; a coroutine function runs in the loop that awaits this."""
        try:
            value = self._begin(name, arguments_json)
            return ToolOutcome(content=result_text(await value if inspect.isawaitable(value) else value))
        except _PASSING:
            raise
        except BaseException as error:
            return _failure(error)

    def _begin(self, name: str, arguments_json: str) -> Any:
        """Call the function and return what it returns, an awaitable of a coroutine function."""
        function = self.functions.get(name)
        if function is None:
            raise _NotRun(self._no_function(name))
        try:
            arguments = json.loads(arguments_json.strip() or "{}")
            if not isinstance(arguments, dict):
                raise _NotRun(f"the arguments of {name} must be a JSON object")
            given = function.members.read(arguments)
        except Misfit as misfit:
            raise _NotRun(f"{name} was not called: {misfit}") from None
        except RecursionError:
            raise _NotRun(f"the arguments of {name} are nested too deeply") from None
        except ValueError as error:
            raise _NotRun(f"the arguments of {name} are not JSON: {error}") from None
        return function.call(**given)

    def _no_function(self, name: str) -> str:
        names = [schema["function"]["name"] for schema in self.declared]
        if name in names:
            return f"{name} cannot be run here"
        near = difflib.get_close_matches(name, names, n=1)
        instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}" if names else "there is none"
        return f"there is no tool {name}; {instead}"


class _NotRun(Exception):
    """A call is wrong; the message is for the model."""


def function_of(f: Callable[..., Any]) -> Function:
    """Declare a function as a tool.

    Its name is the tool's, the first paragraph of its docstring the description, its parameters the arguments. Their
    types come from the annotations, their descriptions from `Annotated[T, "…"]` or from the docstring (Google, NumPy or
    reST style). A parameter without annotation takes any JSON value.

    Raises:
        RequestError: it has no name, a parameter that cannot be passed by name, or an annotation that is not JSON's.
    """
    name = _name(f)
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError) as error:
        raise _refused(f"{name}() does not tell its parameters; write a function around it with def") from error
    if parameters and parameters[0].name in ("self", "cls") and not inspect.ismethod(f):
        raise _refused(f"{name}() is a method without its object; pass it as object.{name}")
    for parameter in parameters:
        if parameter.kind in _UNNAMED:
            raise _refused(f"{parameter.name!r} of {name}() {_UNNAMED[parameter.kind]}")
    hints = _hints(f, name, parameters)
    doc = inspect.getdoc(f)
    members = members_of(
        [Member(name=p.name, annotation=hints.get(p.name, EMPTY), default=p.default) for p in parameters],
        doc,
        f"{name}()",
    )
    summary = read_docstring(doc, list(members.shapes)).summary
    described = {"description": summary} if summary else {}
    schema = {"type": "function", "function": {"name": name, **described, "parameters": members.schema}}
    return Function(name=name, call=f, schema=schema, members=members)


def schema_of(f: Callable[..., Any]) -> dict[str, Any]:
    """Return what the model is told of a function, OpenAI-shaped.

    Raises:
        RequestError: as `function_of`.
    """
    return function_of(f).schema


def tools_of(tools: Iterable[Callable[..., Any] | Mapping[str, Any] | Function] | Toolset) -> Toolset:
    """Return functions and ready schemas as a toolset, in the given order.

    Raises:
        RequestError: one of them is not understood, or two have the same name.
    """
    if isinstance(tools, Toolset):
        return tools
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise _refused(f"tools is {type(tools).__name__}; it must be a list, such as tools=[{_example(tools)}]")
    declared: list[dict[str, Any]] = []
    functions: dict[str, Function] = {}
    names: set[str] = set()
    for position, tool in enumerate(tools):
        if isinstance(tool, Mapping):
            schema = _schema(tool, position)
        else:
            function = tool if isinstance(tool, Function) else function_of(tool)
            functions[function.name] = function
            schema = function.schema
        name = schema["function"]["name"]
        if name in names:
            raise _refused(f"two tools are called {name!r}; rename one")
        names.add(name)
        declared.append(schema)
    return Toolset(declared=tuple(declared), functions=functions)


def _refused(message: str) -> RequestError:
    return RequestError(message, param="tools")


def _example(tools: object) -> str:
    name = getattr(tools, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "f"


def _name(f: object) -> str:
    """Return the name of a function, or refuse what is none."""
    if not callable(f):
        raise _refused(f"a tool must be a function or a schema, not {type(f).__name__}")
    name = getattr(f, "__name__", None)
    if isinstance(f, type):
        raise _refused(f"{name} is a class; pass a function that makes one")
    if not isinstance(name, str):
        raise _refused(f"{type(f).__name__} has no name to be called by; write a function around it with def")
    if name == "<lambda>":
        raise _refused("a lambda has no name to be called by; write it with def")
    _require_name(name, "a function")
    return name


def _require_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refused(
            f'{what} is called {name!r}; a name is one line of text, at least a character, without ", < and >'
        )


def _schema(tool: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Return a ready schema as it is, or refuse what is none."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refused(
            f"tool {position} must be a function or an object with a 'function', not {sorted(tool, key=str)}"
        )
    if tool.get("type", "function") != "function":
        raise _refused(f"tool {position} is of type {tool['type']!r}; only 'function' is known")
    _require_name(function.get("name"), f"tool {position}")
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name in properties if isinstance(properties, Mapping) else ():
        _require_name(name, f"a parameter of {function['name']}")
    return dict(tool)


def _hints(f: Callable[..., Any], name: str, parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """Return the annotations of parameters; what the function returns need not mean anything here."""

    def stub() -> None: ...

    stub.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not EMPTY}
    source = inspect.unwrap(f)
    try:
        return typing.get_type_hints(stub, getattr(source, "__globals__", {}), include_extras=True)
    except Exception as error:  # an annotation that is text can be any expression
        raise _refused(
            f"the annotations of {name}() mean nothing: {error}; what they name must be defined at the top level"
        ) from error


def _failure(error: BaseException) -> ToolOutcome:
    try:
        said = str(error)
    except Exception:
        said = "it cannot be printed"
    if isinstance(error, _NotRun):
        return ToolOutcome(content=result_text(f"Error: {said}"), error=result_text(said))
    what = f"{type(error).__name__}{': ' * bool(said)}{said}"
    return ToolOutcome(content=result_text(f"Error: {what}"), error=result_text(what), exception=error)


def _finished(work: Awaitable[Any]) -> Any:
    """Run a coroutine on a thread of its own and return its result; an interrupt cancels it and is raised."""
    result: Future[Any] = Future()
    cancels: list[Callable[[], object]] = []

    async def watched() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancels.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def serve() -> None:
        try:
            result.set_result(asyncio.run(watched()))
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(serve,), name="dsv4nb-tool", daemon=True)
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:
        for cancel in cancels:
            with contextlib.suppress(RuntimeError):  # it has ended
                cancel()
        thread.join(JOIN_S)
        raise
