"""Reads the text of recipes: files by path, and the recipes that come with Maskfleet by name.

Recipes are not validated here, so that a list of recipes does not import the schema.
"""

from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from launcher.errors import RecipeError
from launcher.runtime.recipe.document import RecipeDocument, parse_document


def bundled() -> dict[str, str]:
    """Return the YAML text of the recipes that come with Maskfleet, by name."""
    folder = resources.files("launcher.runtime.recipe") / "library"
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {entry.name.removesuffix(".yaml"): entry.read_text("utf-8") for entry in sorted(files, key=lambda e: e.name)}


def recipe_text(name_or_path: str) -> str:
    """Return a recipe's YAML as written, comments included. Raises RecipeError if there is no such recipe."""
    path = Path(name_or_path)
    try:
        if path.is_file():
            return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: {error.reason}", remedy="save it as UTF-8") from error
    except (OSError, ValueError) as error:  # no permission, or a name that no file can have
        raise RecipeError(f"{path} cannot be read: {error}", remedy="give another file") from error
    known = bundled()
    if name_or_path in known:
        return known[name_or_path]
    close = get_close_matches(name_or_path, known, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]}? " if close else ""
    raise RecipeError(
        f"there is no recipe {name_or_path!r}: no such file, and not a bundled recipe",
        remedy=f"{guess}bundled recipes: {', '.join(known)}; or give the path of a YAML file",
    )


def read_recipe(name_or_path: str) -> RecipeDocument:
    """Return the document of a recipe. Raises the errors of `recipe_text` and `parse_document`."""
    text = recipe_text(name_or_path)
    return parse_document(text, name_or_path if Path(name_or_path).is_file() else f"{name_or_path}.yaml")
