"""What is installed, what an import costs, and what the repository may hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsv4nb
from dsv4nb.kernelspec import install as kernelspec

ROOT = Path(__file__).parents[1]


def _python(code: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_importing_the_package_is_quick_and_loads_neither_torch_nor_widgets() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import dsv4nb; s = time.perf_counter() - t\n"
        "print(s, [m for m in ('torch', 'ipywidgets', 'numpy', 'transformers') if m in sys.modules])"
    )
    seconds, loaded = min(_python(code).split(" ", 1) for _ in range(3))
    assert float(seconds) < 0.3
    assert loaded.strip() == "[]"


@pytest.mark.parametrize("name", dsv4nb.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(dsv4nb, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsv4nb.nothing


def test_the_engine_imports_without_jupyter() -> None:
    code = (
        "import sys\n"
        "for m in ('IPython', 'ipywidgets', 'anywidget', 'traitlets'): sys.modules[m] = None\n"
        "import dsv4nb.model, dsv4nb.engine.cpu, dsv4nb.reference.network\nprint('ok')"
    )
    assert _python(code).strip() == "ok"


def test_m03_loading_and_generating_never_imports_transformers() -> None:
    code = (
        "import sys, dsv4nb\n"
        "with dsv4nb.load('toy') as m: text = m.generate('Hello!', temperature=0.0, max_new=20).text\n"
        "print('transformers' in sys.modules, bool(text))"
    )
    assert _python(code).strip() == "False True"


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_the_bundled_model_is_small_enough_for_git() -> None:
    files = [f for f in _tracked() if "dsv4nb/toy/model" in f.as_posix()]
    assert files
    assert sum(f.stat().st_size for f in files) < 12_000_000


def test_no_module_takes_the_name_of_a_standard_one_or_is_a_drawer() -> None:
    refused = {*sys.stdlib_module_names, "utils", "helpers", "common", "misc"}
    names = [f for f in _tracked() if f.suffix == ".py" and f.is_relative_to(ROOT / "dsv4nb")]
    assert not [f for f in names if f.stem in refused - {"queue"}]


def test_widget_code_fetches_nothing() -> None:
    for file in _tracked():
        if file.parent.name == "static" and file.suffix in (".js", ".css"):
            assert not re.search(r"https?://(?!www\.w3\.org/)\w", file.read_text(encoding="utf-8")), file.name


def test_j28_the_wheel_brings_the_kernel_where_jupyter_looks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    expected = {f"dsv4nb/kernelspec/{file}": f"share/jupyter/kernels/dsv4nb/{file}" for file in kernelspec.FILES}
    assert {source: to for source, to in shared.items() if source.startswith("dsv4nb/kernelspec")} == expected
    assert all((ROOT / source).is_file() for source in expected)


def test_j28_the_kernel_loads_the_extension_in_the_python_that_lists_it() -> None:
    spec = kernelspec.spec()
    assert spec["argv"] == ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--ext", "dsv4nb"]
    assert (spec["display_name"], spec["language"]) == ("DeepSeek V4 (dsv4nb)", "python") and "env" not in spec


def test_the_readme_has_exactly_two_shell_commands() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    assert all(len(b.strip().splitlines()) == 1 for b in blocks)
    assert "jupyter lab notebooks/01_tour.ipynb" in blocks[0]
    assert "pytest" in blocks[1]
