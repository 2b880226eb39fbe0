"""Turns the text of a recipe into a `Recipe`: applies `--set` overrides and refuses recipes that cannot work."""

import logging
from collections.abc import Mapping

from launcher.errors import RecipeError
from launcher.runtime.recipe.checks import combination_issues
from launcher.runtime.recipe.document import RecipeDocument, apply_assignments, parse_document, validate, with_sections
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import read_recipe

_log = logging.getLogger(__name__)


def load(name_or_path: str, assignments: tuple[str, ...] = (), sections: Mapping[str, object] | None = None) -> Recipe:
    """Return a bundled recipe by name, or a YAML file by path, with `--set` assignments applied.

    Raises RecipeError, which names file, line, path, value and remedy of every mistake.

    Args:
        sections: sections that replace whole sections of the recipe, such as `corpus`, before the assignments are
            applied. A source keeps the languages of the recipe's source of the same name.
    """
    document = read_recipe(name_or_path)
    return recipe_from_document(
        apply_assignments(with_sections(document, _with_recipe_languages(document, sections or {})), assignments)
    )


def _with_recipe_languages(document: RecipeDocument, sections: Mapping[str, object]) -> Mapping[str, object]:
    """Return `sections`; a source without languages gets those of the recipe's source of the same name."""
    recipe_sources, given = (_sources_by_name(data) for data in (document.data, sections))
    kept = {
        name: {"languages": recipe_sources[name]["languages"], **source}
        for name, source in given.items()
        if "languages" in recipe_sources.get(name, {})
    }
    corpus = sections.get("corpus")
    if not kept or not isinstance(corpus, dict):
        return sections
    return {**sections, "corpus": {**corpus, "sources": {**given, **kept}}}


def _sources_by_name(data: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the sources of a recipe by name, without those that are not mappings."""
    corpus = data.get("corpus")
    sources = corpus.get("sources") if isinstance(corpus, dict) else None
    if not isinstance(sources, dict):
        return {}
    return {name: source for name, source in sources.items() if isinstance(source, dict)}


def with_assignments(recipe: Recipe, assignments: tuple[str, ...]) -> Recipe:
    """Return `recipe` with `--set` assignments applied. Raises RecipeError."""
    return recipe_from_document(apply_assignments(RecipeDocument(recipe.to_data(), recipe.name, {}), assignments))


def parse_recipe(text: str, name: str, *, is_bundled: bool = False) -> Recipe:
    """Return the recipe in `text`. `name`: the recipe's name in messages. `is_bundled`: whether it comes with
    Maskfleet. Raises RecipeError."""
    return recipe_from_document(parse_document(text, name, is_bundled=is_bundled))


def recipe_from_document(document: RecipeDocument) -> Recipe:
    """Return the recipe in `document`. Checks types and ranges first, then combinations. Raises RecipeError."""
    recipe = validate(Recipe, document)
    _warn_of_kept_half_interval(recipe, document)
    problems = combination_issues(recipe)
    if problems:
        raise RecipeError(
            "\n".join(f"{document.location_text(problem.path)}: {problem.what}" for problem in problems),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )
    return recipe


def _warn_of_kept_half_interval(recipe: Recipe, document: RecipeDocument) -> None:
    """Warn if `--set` changed only the steps or the minutes of an interval that has both: the other still applies."""
    every = recipe.checkpoint.every
    path = ("checkpoint", "every")
    named = {name for name in ("steps", "minutes") if (*path, name) in document.overridden}
    if len(named) == 1 and every.steps is not None and every.minutes is not None:
        (name,) = named
        alone = f"checkpoint.every={{{name}: {getattr(every, name):g}}}"
        _log.warning("checkpoint.every is now %s; to keep one limit only: --set '%s'", every.to_text(), alone)
