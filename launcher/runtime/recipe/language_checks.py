"""Finds languages and translations in a recipe that do not fit its sources, rows or model."""

from collections.abc import Iterator

from data_service.samples.pairs import Translations
from data_service.samples.texts import TextPairs
from encoder_core.families.catalogue import embedded_languages
from launcher.runtime.recipe.parts import RecipeIssue
from launcher.runtime.recipe.schema import Recipe

PAIR = 2  # number of languages of a source of translations


def language_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield every mismatch of languages in `recipe`."""
    yield from _source_issues(recipe)
    yield from _row_issues(recipe)
    yield from _share_issues(recipe)


def _source_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield sources without a language that the model knows, if it has embeddings of languages: each token needs
    one."""
    known = embedded_languages(recipe.model)
    for name, source in recipe.corpus.sources.items() if known else ():
        path = ("corpus", "sources", name, "languages")
        unknown = [language for language in source.languages if language not in known]
        if not source.languages:
            yield RecipeIssue(
                path,
                f"the model has an embedding for each language, but source {name} does not say its language",
                f"name it, as in languages: [{known[0]}] (translations have two), or set model.languages to []",
            )
        elif unknown:
            yield RecipeIssue(
                path,
                f"the model has no language {' and no language '.join(unknown)}; it has {', '.join(known)}",
                "name one that it has, or add the language to model.languages",
            )


def _row_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    translated = [name for name, source in recipe.corpus.sources.items() if len(source.languages) == PAIR]
    if isinstance(recipe.input, Translations) and not translated:
        yield RecipeIssue(
            ("input", "packing"),
            "rows are to be translations, but no source has two languages",
            f"give the languages of a corpus of pairs, as in corpus.sources.NAME.languages=[en, fr], or set "
            f"input.packing to {recipe.input.text}",
        )
    if translated and not isinstance(recipe.input, Translations | TextPairs):
        yield RecipeIssue(
            ("input", "packing"),
            f"source {translated[0]} has two languages, as translations have, but input.packing is "
            f"{recipe.input.packing}",
            "set input.packing to translations, or name one language",
        )


def _share_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.mixing.translations is None:
        return
    kinds = {len(source.languages) == PAIR for source in recipe.corpus.sources.values()}
    if kinds != {True, False}:
        yield RecipeIssue(
            ("mixing", "translations"),
            "it is the share of translations among plain text, but the sources are not of both kinds",
            "leave it out, or give sources of both kinds",
        )
    weighted = [name for name, source in recipe.corpus.sources.items() if source.weight != "auto"]
    if weighted:
        yield RecipeIssue(
            ("mixing", "translations"),
            f"sources have weights of their own ({', '.join(weighted)}), which decide the share of translations",
            "set the weights to auto, or leave mixing.translations out",
        )
