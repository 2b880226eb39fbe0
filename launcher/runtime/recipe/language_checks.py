"""Languages and translations that do not fit the sources, the rows or the model."""

from collections.abc import Iterator

from data_service.samples.pairs import Translations
from data_service.samples.texts import TextPairs
from encoder_core.families.catalogue import language_table
from launcher.runtime.recipe.parts import RecipeIssue
from launcher.runtime.recipe.schema import Recipe

PAIR = 2  # languages of a source of translations


def language_problems(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Every mismatch in `recipe`."""
    yield from _sources(recipe)
    yield from _rows(recipe)
    yield from _share(recipe)


def _sources(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Where the model has embeddings of languages, every token needs one of them."""
    known = language_table(recipe.model)
    for name, source in recipe.corpus.sources.items() if known else ():
        path = ("corpus", "sources", name, "languages")
        unknown = [language for language in source.languages if language not in known]
        if not source.languages:
            yield RecipeIssue(
                path,
                f"the model has an embedding of each language, and that of source {name} is not told",
                f"name it, as in languages: [{known[0]}], or the two of translations; or set model.languages to []",
            )
        elif unknown:
            yield RecipeIssue(
                path,
                f"the model has no language {' and no language '.join(unknown)}, but {', '.join(known)}",
                "name one of these, or add it to model.languages",
            )


def _rows(recipe: Recipe) -> Iterator[RecipeIssue]:
    translated = [name for name, source in recipe.corpus.sources.items() if len(source.languages) == PAIR]
    if isinstance(recipe.input, Translations) and not translated:
        yield RecipeIssue(
            ("input", "packing"),
            "rows are to be translations, and no source has two languages",
            f"give the languages of a corpus of pairs, as in corpus.sources.NAME.languages=[en, fr], or set "
            f"input.packing to {recipe.input.text}",
        )
    if translated and not isinstance(recipe.input, Translations | TextPairs):
        yield RecipeIssue(
            ("input", "packing"),
            f"source {translated[0]} has two languages, as translations have, and rows are {recipe.input.packing}",
            "set input.packing to translations, or name one language",
        )


def _share(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.mixing.translations is None:
        return
    kinds = {len(source.languages) == PAIR for source in recipe.corpus.sources.values()}
    if kinds != {True, False}:
        yield RecipeIssue(
            ("mixing", "translations"),
            "it is the share of translations beside plain text, and not both are among the sources",
            "leave it out, or give sources of both kinds",
        )
    weighted = [name for name, source in recipe.corpus.sources.items() if source.weight != "auto"]
    if weighted:
        yield RecipeIssue(
            ("mixing", "translations"),
            f"sources have weights of their own ({', '.join(weighted)}), which decide the share of translations",
            "set the weights to auto, or leave mixing.translations out",
        )
