"""`rvbundle init`: a commented recipe for the agent in a folder, filled in as far as can be seen."""

import importlib.metadata
import re
import sys
from pathlib import Path

from rvbundle.analysis import imports_of
from rvbundle.lock import quoted
from rvbundle_runtime.errors import RecipeError

_USUAL_ENTRIES = ("train.py", "main.py", "agent.py", "run.py", "play.py")
_MAIN = re.compile(r"""if\s+__name__\s*==\s*['"]__main__['"]""")
# Import names that differ from the distribution's, for the packages that agents are made of.
_DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "Box2D": "box2d",
    "cv2": "opencv-python-headless",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "stable_baselines3": "stable-baselines3",
    "sb3_contrib": "sb3-contrib",
    "yaml": "pyyaml",
}

_TEMPLATE = """\
# What `rvbundle build` makes {name}-0.1.0.rvb from. All paths are relative to this file.

[agent]
name = {name_text}
version = "0.1.0"
entry = {entry}                 # or "package.module:function"
include = []                       # data files, as globs: ["checkpoints/*.pt"]

[python]
version = {python}
{requires}

# Workloads: what they use is what the image keeps at hand, and they are run again inside the finished
# image to prove it. Short ones that visit every path (train, save, load, evaluate) are best.
[[trace]]
args = []                          # such as ["--episodes", "3"]
golden = true                      # stdout must be the same inside the image, byte for byte
# tolerance = 1e-4                 # ... or its numbers within this relative difference
timeout = 600                      # seconds

# [trim]
# level = "traced"                 # "reachable" keeps all that could be imported, "none" everything

# [keep]
# modules = ["torch.fft"]          # always in the image, with what is below them
# files = ["*/models/*.onnx"]

[run]
network = false                    # may the agent use the network?
env = {{}}                           # variables that it starts with
"""


def write_recipe(folder: Path, force: bool) -> Path:
    """Write `folder`/recipe.toml and return its path; raises RecipeError if one is there already."""
    path = folder / "recipe.toml"
    if path.exists() and not force:
        raise RecipeError(f"{path} is there already", "--force replaces it")
    if not folder.is_dir():
        raise RecipeError(f"{folder} is no folder")
    try:
        path.write_text(recipe_text(folder))
    except OSError as error:
        raise RecipeError(f"can't write {path}: {error.strerror}") from None
    return path


def recipe_text(folder: Path) -> str:
    """Return the text of a recipe for the agent in `folder`; raises RecipeError if there is none."""
    entry = _entry(folder)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:100].rstrip("-._") or "agent"
    return _TEMPLATE.format(
        name=name,
        name_text=quoted(name),
        entry=quoted(entry.name),
        python=quoted(f"{sys.version_info.major}.{sys.version_info.minor}"),
        requires=_requires(folder),
    )


def _entry(folder: Path) -> Path:
    scripts = sorted(folder.glob("*.py"))
    if not scripts:
        raise RecipeError(
            f"there is no Python file in {folder.resolve()}", "run `rvbundle init` in the agent's folder"
        )
    for name in _USUAL_ENTRIES:
        if folder / name in scripts:
            return folder / name
    startable = [s for s in scripts if _MAIN.search(s.read_text(errors="replace"))]
    return (startable or scripts)[0]


def _requires(folder: Path) -> str:
    if (folder / "requirements.txt").is_file():
        return 'requirements = "requirements.txt"'
    imported = {name.partition(".")[0] for s in folder.glob("*.py") for name in imports_of(s.read_bytes())}
    local = {s.stem for s in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
    names = sorted(imported - set(sys.stdlib_module_names) - local)
    found = [_requirement(name) for name in names]
    text = quoted(found)
    note = "" if all("==" in item for item in found) else "  # pin versions: name==1.2.3"
    return f"requires = {text}{note}"


def _requirement(module: str) -> str:
    name = _DISTRIBUTIONS.get(module, module)
    try:
        version = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return name
    return f"{name}=={version}"
