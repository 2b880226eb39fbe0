"""Creates a run on synthetic rows."""

from datetime import UTC, datetime

from data_service.corpus.manifest import PairTexts
from data_service.samples.packing import EDGE_TOKENS
from data_service.samples.pairs import Translations
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.store.open import open_store
from launcher.plan.measure.rows import RandomText, first_ordinary, random_tokenizer, write_corpus
from launcher.plan.measure.trial import Trial
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run
from launcher.runtime.run.inputs import read_inputs

_BLOCK_TOKENS = 500_000
_BATCHES = 8  # at least so many in an epoch


def prepare(trial: Trial, folder: str) -> str:
    """Create a run of the trial's recipe on synthetic rows below `folder`, and return its URI."""
    recipe = trial.recipe
    corpus, vocabulary = f"{folder}/corpus", recipe.model.vocabulary
    batch = recipe.phases[0].rows * recipe.phases[0].length * recipe.input.texts
    blocks = 1 + _BATCHES * batch // _BLOCK_TOKENS
    tokenizer = random_tokenizer(vocabulary)
    text = _text(recipe, vocabulary)
    write_corpus(open_store(corpus), blocks, text, vocabulary=vocabulary, tokenizer=tokenizer)
    uri = f"{folder}/run"
    create_run(trial.at(corpus, f"{corpus}/tokenizer"), uri, datetime.now(UTC), read_inputs)
    return uri


def _text(recipe: Recipe, vocabulary: int) -> RandomText:
    """Return text that fills the rows: where a row holds whole texts, each is as long as the row permits."""
    ids, full = range(first_ordinary(), vocabulary), recipe.phases[0].length - EDGE_TOKENS
    match recipe.input:
        case TextPairs(negatives=negatives):
            return RandomText(ids, _BLOCK_TOKENS, PairTexts(negatives), full)
        case Translations():
            each = (recipe.phases[0].length - 2 * EDGE_TOKENS) // 2
            return RandomText(ids, _BLOCK_TOKENS, PairTexts(0), each)
        case RepeatedSentences():
            return RandomText(ids, _BLOCK_TOKENS, None, full)
        case _:
            return RandomText(ids, _BLOCK_TOKENS)
