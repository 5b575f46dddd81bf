"""What the machine and the notebook are, for whom a panel stays blank or a click does nothing."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from dsv4nb import __version__, environ

Facts = tuple[tuple[str, str], ...]

_COMPUTE = ("torch", "triton", "safetensors", "tokenizers", "llguidance")
_NOTEBOOK = ("ipykernel", "ipywidgets", "anywidget", "jupyterlab", "notebook")
_HOSTS = {
    "colab": "Google Colab",
    "vscode": "VS Code; a notebook that is not trusted shows the saved form of a panel",
    "jupyter": "a Jupyter server; a notebook that is not trusted shows the saved form of a panel",
    "": "no notebook that is known",
}
_SUBSHELLS = (7, 0)  # ipykernel from here on hears a panel while a cell runs
_ROUTED = (7, 4)  # and from here on answers it where the last message was sent from


def facts() -> Facts:
    """Return versions, devices and host as (label, text)."""
    return (
        ("dsv4nb", __version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("arithmetic", _versions(_COMPUTE)),
        ("GPUs", _gpus()),
        ("notebook", _versions(_NOTEBOOK)),
        ("host", _HOSTS[environ.host()]),
        ("panels", panels(_version("ipykernel"), _version("anywidget"))),
    )


def panels(kernel: str, widgets: str) -> str:
    """Tell what to expect of panels on these versions of ipykernel and anywidget, "" for one that is not there."""
    if not (kernel and widgets):
        absent = [name for name, there in (("ipykernel", kernel), ("anywidget", widgets)) if not there]
        missing, verb = " and ".join(absent), "is" if len(absent) == 1 else "are"
        return f"none, {missing} {verb} missing: pip install 'dsv4nb[jupyter]'; replies are text"
    release = tuple(int(part) for part in kernel.split(".")[:2] if part.isdigit())
    if release < _SUBSHELLS:
        return "clicks are heard when no cell runs, Stop by the kernel's interrupt too; ipykernel 7 hears them always"
    if release < _ROUTED:
        return "clicks are heard while a cell runs; ipykernel before 7.4 can lose one: click again"
    return "clicks are heard while a cell runs; the route of answers is pinned"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{i}: {one.name}, {one.total_memory / 2**30:.0f} GiB" for i, one in enumerate(names))


def _versions(names: tuple[str, ...]) -> str:
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    return ", ".join(found) or "nothing of it"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
