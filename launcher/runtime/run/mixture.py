"""Whether the corpora hold what the phases of a new run are to read of them (`phases.N.mixture`)."""

from data_service.corpus.manifest_file import load_manifest
from data_service.samples.packing import Packed
from data_service.store.open import open_store
from data_service.stream.stream import Stream
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RecipeError
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import is_staged, source_shares, tokens_before
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import stream_spec

COUNTED = 50_000_000  # tokens of text: counted row by row in a second or two
FULL = 0.85  # of a row's tokens are text, at least: what ends before a sentence does not fit is less


def check_mixture(run: Run, tokenizer: Tokenizer) -> None:
    """Refuse a new run that would read a source more often than it may, or never. `run` need not exist yet.

    Small corpora are counted, so this is exact. Of others it is assumed that rows are nearly full: what is no more than
    a little too much is found when training starts, and rows have been counted.

    Raises:
        PlanError, RecipeError: so it is. CorpusError, StoreError: text that cannot be read.
    """
    recipe = run.recipe
    if not is_staged(recipe):
        return
    sizes = {
        name: int(load_manifest(open_store(source.uri)).train.tokens.sum())
        for name, source in recipe.corpus.sources.items()
    }
    if sum(sizes.values()) <= COUNTED:
        Stream(stream_spec(run, tokenizer, len(recipe.phases) - 1))
    elif isinstance(recipe.input, Packed) and recipe.input.packing != "doc_sentences":
        _check_readings(recipe, sizes)


def _check_readings(recipe: Recipe, sizes: dict[str, int]) -> None:
    read = dict.fromkeys(sizes, 0.0)
    step = 0
    for number, phase in enumerate(recipe.phases):
        tokens = FULL * (tokens_before(recipe, step + phase.steps) - tokens_before(recipe, step))
        step += phase.steps
        total = sum(sizes.values())
        shares = source_shares(recipe, phase) or {name: size / total for name, size in sizes.items()}
        most = None if phase.mixture is None else phase.mixture.most_readings
        for name, share in shares.items():
            read[name] += share * tokens / sizes[name]
            if share and most is not None and read[name] > most:
                raise RecipeError(
                    f"corpus.sources.{name} has {sizes[name]:,} tokens, and would be read about {read[name]:.1f} times "
                    f"by the end of phase {number}, more than phases.{number}.mixture.most_readings, {most:g}",
                    remedy="give it less weight in the phases, give more text, shorten the phases, or set "
                    f"most_readings to {1.2 * read[name]:.1f}",
                )
