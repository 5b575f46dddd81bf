"""What a saved notebook shows without a kernel, without JavaScript and without a network: everything that was said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
TOY = Path(__file__).parents[2] / "dsv4nb/toy/model"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not (TOY / "config.json").exists(), reason="the bundled model is not in dsv4nb/toy/model"),
]

CELLS = (
    'import dsv4nb\nm = dsv4nb.load("toy")\nchat = m.chat(temperature=0, logprobs=5)\nchat',
    "dsv4nb.SamplerPanel(chat)",
    "rounds = dsv4nb.AcceptancePanel(chat)\nrounds",
    "dsv4nb.CachePanel(m, chat)",
    "dsv4nb.TokenLens(chat)",
    "dsv4nb.QueuePanel(m)",
    "dsv4nb.LoadPanel(m)",
    'chat.send("What is the capital of France?")\nNone',
    # until the panels have taken over the end
    "from dsv4nb.stream.frames import shared_pump\nimport time\nlate = time.monotonic() + 60\n"
    "while 'mean acceptance length' not in rounds.saved().bundle()['text/html'] and time.monotonic() < late:\n"
    "    time.sleep(0.1)\n"
    "time.sleep(1)\nshared_pump().drain()",
)
# by panel, what a reader finds of it
SHOWN = (
    "The capital of France is Paris.",
    "temperature",
    "mean acceptance length",
    "reset",
    "perplexity",
    "waiting",
    "vocabulary",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with every panel, run and saved as a page."""
    nbclient = pytest.importorskip("nbclient")
    nbconvert = pytest.importorskip("nbconvert")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    notebook.metadata.pop("widgets", None)  # what most readers' viewers know of widgets
    page = tmp_path_factory.mktemp("saved") / "saved.html"
    page.write_text(nbconvert.HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    return page


@pytest.fixture
def page(saved: Path) -> Iterator[Any]:
    """The page in a browser without scripts and without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 1000, "height": 900})
        page = context.new_page()
        page.goto(saved.as_uri())
        yield page
        browser.close()


def test_j11_every_panel_can_be_read(page: Any, shots: Path) -> None:
    outputs = page.locator(".jp-OutputArea-output")
    text = outputs.all_inner_texts()
    page.screenshot(path=shots / "saved.png", full_page=True)
    assert [word for word in SHOWN if not any(word in one for one in text)] == []
    assert page.locator(".jp-OutputArea-output svg").count() >= 1, "the bars of the rounds"
    assert not [one for one in text if "object at 0x" in one]


def test_no_picture_or_frame_is_fetched(saved: Path, page: Any) -> None:
    outputs = page.locator(".jp-OutputArea-output")
    assert outputs.locator("img, iframe, object, embed, link, script").count() == 0
