"""Finds inputs, objectives, languages and models in a recipe that cannot be combined, and batch settings that the input
or the mixing of sources does not allow."""

from collections.abc import Iterator

from data_service.samples.lanes import Lanes
from data_service.samples.packing import PackedInput
from data_service.samples.pairs import Translations
from data_service.samples.texts import RepeatedSentences, TextPairs
from encoder_core.families.catalogue import embedded_languages
from encoder_core.objectives.compose import refusals
from encoder_core.objectives.term import PhaseFacts, TermSetting
from launcher.runtime.recipe.objective import LANE_SPECIAL_TOKENS, row_facts
from launcher.runtime.recipe.parts import RecipeIssue
from launcher.runtime.recipe.schema import Recipe

_COMBINATION_REMEDY = 'infra/docs/recipes.md, section "What goes together", has a table of the combinations'
MIN_SEGMENT_TOKENS = 2  # tokens that a row of XLNet needs at least for its two new segments: one for each


def objective_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield every mismatch of objective, input and model. Each loss term reports its own mismatches (`refusals`)."""
    rows = row_facts(recipe.input, recipe.objective.masking)
    phases = tuple(PhaseFacts(phase.length, phase.batch.sequences) for phase in recipe.phases)
    for found in refusals(TermSetting(recipe.model, recipe.objective.terms, rows, phases)):
        combines = found.path[0] in ("objective", "input")
        yield RecipeIssue(
            found.path, found.what, f"{found.remedy}; {_COMBINATION_REMEDY}" if combines else found.remedy
        )
    yield from _causal_phase_issues(recipe)
    yield from _token_type_issues(recipe)
    if isinstance(recipe.input, Lanes):
        yield from _lane_issues(recipe, recipe.input)
        yield from _recurrence_issues(recipe, recipe.input)


def _causal_phase_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Refuse phases in which attention would have to hide tokens from some terms and not from others."""
    if recipe.objective.clm is None or recipe.objective.mlm is None:
        return
    for index, phase in enumerate(recipe.phases):
        if phase.objective is None:
            yield RecipeIssue(
                ("phases", index, "objective"),
                "the objective has clm and mlm, which cannot be trained in one step: attention hides later tokens for "
                "clm and none for mlm, so each would need its own forward pass",
                "set the phase's objective to clm or to mlm",
            )
        elif phase.objective == "clm" and phase.mlm is not None:
            yield RecipeIssue(
                ("phases", index, "mlm"),
                "the phase changes the masks of mlm, but trains clm",
                "remove mlm from the phase, or set the phase's objective to mlm",
            )
        for name in (phase.weights or {}) if phase.objective is not None else ():
            if name != phase.objective:
                yield RecipeIssue(
                    ("phases", index, "weights", name),
                    f"the phase sets a weight for {name}, but trains {phase.objective}",
                    f"set a weight for {phase.objective}, or remove this weight",
                )


def _token_type_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Refuse rows of two segments for a BERT, ALBERT or ELECTRA with one token type.

    Families without token types (RoBERTa, DeBERTa, DistilBERT) tell segments apart by the separator alone, which works.
    """
    if recipe.model.segment_count == 1 and not isinstance(recipe.input, PackedInput | TextPairs | RepeatedSentences):
        yield RecipeIssue(
            ("model", "token_types"),
            f"{recipe.input.packing} rows have two segments, but the model has one token type",
            "set model.token_types to 2, or pack rows of one segment",
        )


def _lane_issues(recipe: Recipe, lanes: Lanes) -> Iterator[RecipeIssue]:
    least = lanes.reuse + LANE_SPECIAL_TOKENS + MIN_SEGMENT_TOKENS
    for index, phase in enumerate(recipe.phases):
        rows = phase.batch.sequences
        if rows is None:
            yield RecipeIssue(
                ("phases", index, "batch"),
                "input.packing=lanes needs a fixed number of rows in each step, but the batch is given in tokens",
                "give the batch in sequences",
            )
        elif lanes.both_directions and rows % 2:
            yield RecipeIssue(
                ("phases", index, "batch", "sequences"),
                f"every second lane is read backwards, so {rows} lanes cannot be paired",
                "use an even number of sequences, or set input.both_directions to false",
            )
        if phase.length < least:
            yield RecipeIssue(
                ("phases", index, "length"),
                f"a row of {phase.length} tokens has no room for {lanes.reuse} reused tokens, two new segments "
                f"and {LANE_SPECIAL_TOKENS} special tokens",
                f"use a length of at least {least}, or lower input.reuse and model.reuse",
            )


def _recurrence_issues(recipe: Recipe, lanes: Lanes) -> Iterator[RecipeIssue]:
    cache = recipe.model.recurrence
    if cache is not None and cache.reuse != lanes.reuse:
        yield RecipeIssue(
            ("model", "reuse"),
            f"the model remembers {cache.reuse} tokens of each row, but the next row begins {lanes.reuse} tokens later",
            f"set model.reuse to {lanes.reuse}, the value of input.reuse",
        )
    keep = recipe.checkpoint.keep_every
    if cache is not None and keep and keep.steps % cache.refresh_steps:
        yield RecipeIssue(
            ("checkpoint", "keep_every", "steps"),
            f"checkpoints are saved at multiples of {cache.refresh_steps} steps, which recompute memory, but few of "
            f"these are multiples of {keep.steps}",
            f"use a multiple of {cache.refresh_steps} (model.memory_refresh)",
        )


def batch_and_mixing_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield every setting of batches and mixing that the input or `mixing.batches` does not allow."""
    yield from _text_batch_issues(recipe)
    yield from _mixing_issues(recipe)


def _text_batch_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        if phase.batch.sequences is not None:
            continue
        if isinstance(recipe.input, TextPairs | RepeatedSentences):
            why = "each example is compared with all others of its batch, which needs a fixed number of rows"
        elif recipe.mixing.batches == "one_source":
            why = "mixing.batches=one_source needs a fixed number of rows"
        else:
            continue
        yield RecipeIssue(("phases", index, "batch"), f"{why}, not tokens", "give the batch in sequences")


def _mixing_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.mixing.batches == "one_source" and isinstance(recipe.input, Lanes):
        yield RecipeIssue(
            ("mixing", "batches"),
            "with input.packing=lanes, rows continue from step to step, so every batch has rows of all sources",
            "set mixing.batches to mixed",
        )
    weighted = [name for name, source in recipe.corpus.sources.items() if source.weight != "auto"]
    if weighted and recipe.mixing.temperature != 1:
        yield RecipeIssue(
            ("mixing", "temperature"),
            f"a temperature applies to sources with weight auto, but some set a weight ({', '.join(weighted)})",
            "set the weights to auto, or mixing.temperature to 1",
        )


LANGUAGES_PER_PAIR = 2  # languages that a source of translation pairs names


def language_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield every mismatch of languages in `recipe`."""
    yield from _source_language_issues(recipe)
    yield from _translation_row_issues(recipe)
    yield from _translation_share_issues(recipe)


def _source_language_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    """Yield sources whose language has no embedding, if the model has language embeddings: each token needs one."""
    known = embedded_languages(recipe.model)
    for name, source in recipe.corpus.sources.items() if known else ():
        path = ("corpus", "sources", name, "languages")
        unknown = [language for language in source.languages if language not in known]
        if not source.languages:
            yield RecipeIssue(
                path,
                f"the model has an embedding for each language, but source {name} does not name its language",
                f"set it, as in languages: [{known[0]}] (translations have two), or set model.languages to []",
            )
        elif unknown:
            yield RecipeIssue(
                path,
                f"the model has no language {' and no language '.join(unknown)}; it has {', '.join(known)}",
                "use a language of the model, or add the language to model.languages",
            )


def _translation_row_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    translated = [name for name, source in recipe.corpus.sources.items() if len(source.languages) == LANGUAGES_PER_PAIR]
    if isinstance(recipe.input, Translations) and not translated:
        yield RecipeIssue(
            ("input", "packing"),
            "input.packing is translations, but no source has two languages",
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


def _translation_share_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.mixing.translations is None:
        return
    kinds = {len(source.languages) == LANGUAGES_PER_PAIR for source in recipe.corpus.sources.values()}
    if kinds != {True, False}:
        yield RecipeIssue(
            ("mixing", "translations"),
            "a share of translations needs sources of translations and sources of plain text",
            "leave mixing.translations out, or add sources of the missing kind",
        )
    weighted = [name for name, source in recipe.corpus.sources.items() if source.weight != "auto"]
    if weighted:
        yield RecipeIssue(
            ("mixing", "translations"),
            f"sources have weights of their own ({', '.join(weighted)}), which decide the share of translations",
            "set the weights to auto, or leave mixing.translations out",
        )
