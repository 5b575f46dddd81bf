from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from dsv4nb.testing.fake_model import fake_model

IMPORTS = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", "dsv4nb")
print(time.perf_counter() - start)
shell.run_cell("%dsv4 set temperature 0.5").raise_error()
shell.run_cell("%dsv4 status").raise_error()
print(sorted({"torch", "ipywidgets", "anywidget", "triton"} & set(sys.modules)))
"""


def run(ip: InteractiveShell, source: str) -> None:
    ip.run_cell(source).raise_error()


def refused(ip: InteractiveShell, source: str) -> str:
    done = ip.run_cell(source)
    assert isinstance(done.error_in_exec, UsageError), done.error_in_exec
    return str(done.error_in_exec)


def test_the_extension_loads_fast_and_brings_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    seconds, *_, modules = done.stdout.splitlines()
    assert float(seconds) < 1.5
    assert modules == "[]"


def test_loading_twice_is_once_and_unloading_removes_the_magics(ip: InteractiveShell) -> None:
    before = ip.magics_manager.magics["cell"]["dsv4"]
    import dsv4nb

    dsv4nb.load_ipython_extension(ip)
    assert ip.magics_manager.magics["cell"]["dsv4"] is before
    ip.run_line_magic("unload_ext", "dsv4nb")
    assert "dsv4" not in ip.magics_manager.magics["cell"] and "dsv4" not in ip.magics_manager.magics["line"]
    ip.run_line_magic("load_ext", "dsv4nb")
    assert "dsv4" in ip.magics_manager.magics["line"]


def test_a_cell_is_asked_and_its_result_kept(ip: InteractiveShell, make_model: Any, capsys: Any) -> None:
    ip.user_ns["m"] = model = make_model()
    run(ip, "%%dsv4 --as answer\nWhat is the capital of France?\n")
    assert model.asked == [("What is the capital of France?", {})]
    assert ip.user_ns["_dsv4"].text == ip.user_ns["answer"].text == "The capital is Paris."
    assert "The capital is Paris." in capsys.readouterr().out


def test_options_reach_the_model_by_their_python_names(ip: InteractiveShell, make_model: Any) -> None:
    ip.user_ns["other"] = model = make_model()
    run(
        ip,
        "%%dsv4 --model other --temperature 0.5 --top-p 0.9 --max-new 7 --seed 3 --thinking --system 'Be brief.' "
        "--no-stream\nhi",
    )
    ((_, options),) = model.asked
    assert options == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_new": 7,
        "seed": 3,
        "thinking": True,
        "system": "Be brief.",
    }


def test_a_reply_takes_the_words_of_speculation(ip: InteractiveShell, make_model: Any) -> None:
    ip.user_ns["m"] = model = make_model()
    run(ip, "%%dsv4 --spec-depth 3 --spec-window slot:0.5:2 --min-p 0.1 --stop END\nhi")
    ((_, options),) = model.asked
    assert options == {"spec_depth": 3, "spec_window": ("slot", 0.5, 2), "min_p": 0.1, "stop": ["END"]}
    run(ip, "%%dsv4 --no-spec\nhi")
    assert model.asked[1][1] == {"spec": False}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--spec-depth 9", "spec_depth has nothing to act on: the checkpoint has no drafter"),
        ("--top-k -1", "top_k is -1; it must be"),
        ("--effort high", "effort is 'high' and thinking is off"),
    ],
)
def test_a_value_that_the_model_refuses_is_one_line(ip: InteractiveShell, line: str, said: str) -> None:
    with fake_model() as model:
        ip.user_ns["m"] = model
        answer = refused(ip, f"%%dsv4 {line}\nhi")
        assert said in answer and "\n" not in answer
        assert not any(model.engine.calls.values())  # type: ignore[attr-defined]


def test_braces_are_text(ip: InteractiveShell, make_model: Any) -> None:
    ip.user_ns["m"] = model = make_model()
    ip.user_ns["x"] = 1
    run(ip, "%%dsv4 --system '{x} $x'\nWhat is {x} in f'{x:02d}' and $x?")
    assert model.asked == [("What is {x} in f'{x:02d}' and $x?", {"system": "{x} $x"})]


def test_reasoning_is_told_apart(ip: InteractiveShell, make_model: Any, capsys: Any) -> None:
    ip.user_ns["m"] = make_model(("reasoning", "7 + 8 = 15"), ("hidden", "</think>"), ("content", "85"))
    run(ip, "%%dsv4\nsum")
    assert capsys.readouterr().out == "[thinking]\n7 + 8 = 15\n\n85\n"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("%%dsv4 --temprature 1\nhi", ["--temprature", "did you mean --temperature?", "--top-p", "--no-stream"]),
        ("%%dsv4 --max-new many\nhi", ["--max-new", "'many'", "Valid:"]),
        ("%%dsv4 --as 3x\nhi", ["'3x' is no variable name"]),
        ("%%dsv4 --system 'open\nhi", ["No closing quotation"]),
        ("%%dsv4 --model nobody\nhi", ["no variable 'nobody'", "%dsv4 load"]),
        ("%%dsv4 --model x\nhi", ["'x' holds no model"]),
        ("%%dsv4\nhi", ["no model is loaded", "%dsv4 load PATH"]),
        ("%dsv4", ["a command is missing", "load, unload, status"]),
        ("%dsv4 lod toy", ["'lod' is unknown", "load, unload, status"]),
        ("%dsv4 load", ["PATH", "--max-seq"]),
        ("%dsv4 unload", ["no model is loaded"]),
        ("%dsv4 unload x", ["'x' holds no model"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(ip: InteractiveShell, source: str, parts: list[str], capsys: Any) -> None:
    ip.user_ns["x"] = 1
    said = refused(ip, source)
    assert "\n" not in said
    for part in parts:
        assert part in said
    assert "Traceback" not in capsys.readouterr().err


def test_help_lists_the_options(ip: InteractiveShell, capsys: Any) -> None:
    run(ip, "%%dsv4 --help\nhi")
    said = capsys.readouterr().out
    assert "--temperature T" in said and "--no-stream" in said


def test_a_request_that_the_model_refuses_is_one_line(ip: InteractiveShell) -> None:
    from dsv4nb.errors import PromptEmpty

    class Refusing:
        is_closed = False

        def submit(self, prompt: str) -> None:
            raise PromptEmpty("prompt")

    ip.user_ns["m"] = Refusing()
    assert "the prompt is empty" in refused(ip, "%%dsv4\n ")


@pytest.mark.parametrize("body", ["", "\n", " \n\t\n"])
def test_m47_an_empty_cell_takes_no_place_in_the_queue(ip: InteractiveShell, body: str) -> None:
    with fake_model() as model:
        ip.user_ns["m"] = model
        assert "empty" in refused(ip, f"%%dsv4\n{body}")
        assert model.queue == [] and not any(model.engine.calls.values())  # type: ignore[attr-defined]


def test_status_without_models_says_how_to_load_one(ip: InteractiveShell, capsys: Any) -> None:
    run(ip, "%dsv4 status")
    assert "%dsv4 load PATH" in capsys.readouterr().out


def test_an_interrupt_keeps_the_partial_text_and_the_model_works_afterwards(
    ip: InteractiveShell, make_model: Any, capsys: Any
) -> None:
    import _thread
    import threading

    words = [("content", f"{i} ") for i in range(500)]
    ip.user_ns["m"] = make_model(*words, delay_s=0.02)
    threading.Timer(0.3, _thread.interrupt_main).start()
    start = time.monotonic()
    done = ip.run_cell("%%dsv4\ncount")
    assert time.monotonic() - start < 1.3
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    said = capsys.readouterr().out
    assert "[Stopped]" in said and "The text so far is in _dsv4." in said and "Traceback" not in said
    text = ip.user_ns["_dsv4"].text
    assert text.startswith("0 1 2 ") and "400" not in text
    ip.user_ns["m"] = make_model()
    run(ip, "%%dsv4\nagain")
    assert ip.user_ns["_dsv4"].text == "The capital is Paris."


@pytest.fixture
def published(ip: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a kernel's shell shows."""
    screen = CapturingDisplayPublisher()
    monkeypatch.setattr(ip, "display_pub", screen)
    monkeypatch.setattr(ip, "kernel", object(), raising=False)
    return screen.outputs


def test_in_a_notebook_one_output_is_replaced_at_most_ten_times_a_second(
    ip: InteractiveShell, make_model: Any, published: list[dict[str, Any]]
) -> None:
    ip.user_ns["m"] = make_model(*[("content", f"<b>{i}</b> ") for i in range(50)], delay_s=0.01)
    start = time.monotonic()
    run(ip, "%%dsv4\ncount")
    took = time.monotonic() - start
    assert len({output["transient"]["display_id"] for output in published}) == 1
    assert [output["update"] for output in published] == [False] + [True] * (len(published) - 1)
    assert 3 <= len(published) <= 10 * took + 3
    lengths = [len(output["data"]["text/plain"]) for output in published[:-1]]
    assert lengths == sorted(lengths) and lengths[-1] > 0
    last = published[-1]["data"]
    assert last["text/plain"] == ip.user_ns["_dsv4"].text
    assert "&lt;b&gt;49&lt;/b&gt;" in last["text/html"] and "50 tokens" in last["text/html"]


def test_the_doctor_is_shown_as_it_goes_on(ip: InteractiveShell, published: list[dict[str, Any]]) -> None:
    with fake_model("one two three") as model:
        ip.user_ns["m"] = model
        run(ip, "%dsv4 doctor --seconds 1e-9")
    assert len({output["transient"]["display_id"] for output in published}) == 1
    assert [output["update"] for output in published] == [False] + [True] * 6
    shown = [output["data"]["text/plain"].splitlines()[0] for output in published]
    assert shown[1].startswith("fake: 1 of 6 checks so far") and shown[6].startswith("fake: 6 checks, 6 skipped")
    assert published[6]["data"]["text/html"].startswith("<p>fake: 6 checks")


def test_in_a_terminal_the_doctor_is_shown_once(ip: InteractiveShell, capsys: Any) -> None:
    with fake_model("one two three") as model:
        ip.user_ns["m"] = model
        run(ip, "%dsv4 doctor --seconds 1e-9")
        said = capsys.readouterr().out
        assert said.startswith("fake: 6 checks, 6 skipped") and said.count("sampler") == 1
        assert "must be a number above 0" in refused(ip, "%dsv4 doctor --seconds 0")


def test_an_interrupted_doctor_leaves_what_it_found(
    ip: InteractiveShell, published: list[dict[str, Any]], capsys: Any
) -> None:
    import signal
    import threading

    def on_step(step: str, state: Any) -> None:
        if step == "restore":  # of the second check
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.05)

    with fake_model("one two three", on_step=on_step) as model:
        ip.user_ns["m"] = model
        done = ip.run_cell("%dsv4 doctor")
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    assert published[-1]["data"]["text/plain"].startswith("fake: 1 of 6 checks so far, 1 ok")
    said = capsys.readouterr().out
    assert "Stopped; the model can be used on." in said and "Traceback" not in said


def test_without_streaming_the_reply_is_shown_once(
    ip: InteractiveShell, make_model: Any, published: list[dict[str, Any]]
) -> None:
    ip.user_ns["m"] = make_model(*[("content", f"{i} ") for i in range(20)], delay_s=0.01)
    run(ip, "%%dsv4 --no-stream\ncount")
    assert len(published) == 2 and published[0]["data"]["text/plain"] == ""


def test_an_interrupted_load_is_one_line_and_binds_nothing(ip: InteractiveShell, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4nb.magics.extension._load", interrupted)
    ip.run_line_magic("reload_ext", "dsv4nb")
    done = ip.run_cell("%dsv4 load toy")
    assert isinstance(done.error_in_exec, KeyboardInterrupt) and "m" not in ip.user_ns
    said = capsys.readouterr().out
    assert "Stopped." in said and "Traceback" not in said


def test_a_fault_of_the_engine_keeps_its_traceback(ip: InteractiveShell) -> None:
    from dsv4nb.errors import EngineError

    with fake_model("one two", faults={0: EngineError("the device is gone")}) as model:
        ip.user_ns["m"] = model
        done = ip.run_cell("%%dsv4\nhi")
    assert isinstance(done.error_in_exec, EngineError)
