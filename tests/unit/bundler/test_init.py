import tomllib
from pathlib import Path

import pytest

from rvbundle.init import recipe_text, write_recipe
from rvbundle.recipe import load
from rvbundle_runtime.errors import RecipeError


def agent(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_the_recipe_is_one_that_can_be_read(tmp_path: Path) -> None:
    folder = agent(tmp_path / "my agent!", train="import json\n")
    path = write_recipe(folder, force=False)
    recipe = load(path)
    assert (recipe.name, recipe.version, recipe.entry) == ("my-agent", "0.1.0", "train.py")
    assert recipe.requires == ()
    assert (recipe.workloads[0].golden, recipe.workloads[0].timeout) == (True, 600.0)


@pytest.mark.parametrize("name", ["x" * 150, "---", "ünï", "1", "a.b-", "\N{ROCKET}"])
def test_any_folder_name(tmp_path: Path, name: str) -> None:
    load(write_recipe(agent(tmp_path / name, train=""), force=False))


@pytest.mark.parametrize("name", ["my train", 'quo"te', "back\\slash", "ü", "\N{ROCKET}"])
def test_any_file_name(tmp_path: Path, name: str) -> None:
    recipe = load(write_recipe(agent(tmp_path / "a", **{name: ""}), force=False))
    assert recipe.entry == f"{name}.py"


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        ({"zzz": "", "train": "", "main": ""}, "train.py"),
        ({"zzz": "", "play": ""}, "play.py"),
        ({"a": "", "b": 'if __name__ == "__main__":\n    pass\n'}, "b.py"),
        ({"a": "", "b": "if __name__=='__main__': pass\n"}, "b.py"),
        ({"b": "", "a": ""}, "a.py"),
    ],
    ids=["usual name", "play", "guarded", "guarded otherwise", "first"],
)
def test_entry(tmp_path: Path, files: dict[str, str], entry: str) -> None:
    assert tomllib.loads(recipe_text(agent(tmp_path, **files)))["agent"]["entry"] == entry


def test_requirements_from_imports(tmp_path: Path) -> None:
    folder = agent(
        tmp_path,
        train="import os, torch_of_no_version\nfrom cv2 import x\nimport helper, pkg.sub\nfrom . import y\n",
        helper="import typer.main\n",
        broken="import (",
    )
    (tmp_path / "pkg").mkdir()
    requires = tomllib.loads(recipe_text(folder))["python"]["requires"]
    assert [r.partition("==")[0] for r in requires] == [
        "opencv-python-headless",
        "torch_of_no_version",
        "typer",
    ]
    assert requires[2].startswith("typer==")
    assert "# pin versions: name==1.2.3" in recipe_text(folder)


def test_requirements_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy\n")
    recipe = load(write_recipe(agent(tmp_path, train="import torch\n"), force=False))
    assert recipe.requirements == tmp_path / "requirements.txt"
    assert recipe.requires == ("numpy",)


def test_a_recipe_that_is_there(tmp_path: Path) -> None:
    agent(tmp_path, train="")
    (tmp_path / "recipe.toml").write_text("mine")
    with pytest.raises(RecipeError) as caught:
        write_recipe(tmp_path, force=False)
    assert (caught.value.message, caught.value.hint) == (
        f"{tmp_path}/recipe.toml is there already",
        "--force replaces it",
    )
    assert (tmp_path / "recipe.toml").read_text() == "mine"
    write_recipe(tmp_path, force=True)
    load(tmp_path)


def test_no_agent(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        write_recipe(tmp_path, force=False)
    assert caught.value.message == f"there is no Python file in {tmp_path}"
    assert caught.value.hint == "run `rvbundle init` in the agent's folder"
    with pytest.raises(RecipeError) as caught:
        write_recipe(tmp_path / "nothing", force=False)
    assert caught.value.message == f"{tmp_path}/nothing is no folder"
