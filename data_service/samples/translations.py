"""Rows of translations, and the languages of rows (XLM: Conneau and Lample 2019, section 3.3).

A row is a sentence and its translation, `<s> one </s><s> other </s>`, each with positions from 0. Pairs that are too
long for the row lose the end of the longer sentence, then of both. Nothing is drawn: an example is a row.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from data_service.errors import CorpusError
from data_service.samples.packing import EDGE_TOKENS, RowCuts, Segments
from data_service.samples.samples import Samples
from data_service.samples.spec import StreamSpec
from data_service.types import Block

TEXTS = 2  # of an example: query and positive; negatives are left out


def translation_rows(block: Block, length: int) -> RowCuts:
    """A row for each document of a corpus of pairs. Raises CorpusError where one has less than two texts."""
    if np.diff(block.documents).min() < TEXTS:
        raise CorpusError(
            f"a document of a corpus of pairs has less than {TEXTS} texts",
            remedy="build the corpus again with `maskfleet corpus build --texts pairs`",
        )
    first = block.documents[:-1, None] + np.arange(TEXTS)
    starts = block.sentences[first]
    sizes = _shortened(block.sentences[first + 1] - starts, length - TEXTS * EDGE_TOKENS)
    return RowCuts.restarted(Segments(starts, sizes, None))


def _shortened(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """[N, 2] sizes of at most `room` in all: the longer gives way down to half of the room, and the other beyond it."""
    one, other = sizes[:, 0], sizes[:, 1]
    other = np.minimum(other, np.maximum(room - one, room // 2))
    return np.stack([np.minimum(one, room - other), other], axis=1)


def in_languages(samples: Samples, spec: StreamSpec, source: int) -> Samples:
    """`samples`, rows of one source, as `spec` reads them beside those of other sources: where some rows are
    translations, all say where their second segment begins; where the model has languages, all say theirs."""
    if spec.reads_translations and samples.segment_starts is None:
        ends = np.diff(samples.offsets).astype(np.int32)
        samples = replace(samples, segment_starts=ends, restarts=np.zeros(samples.rows, dtype=np.bool_))
    if not spec.languages:
        return samples
    numbers = [spec.languages.index(name) for name in spec.sources[source].languages]
    both = np.array([numbers[0], numbers[-1]], dtype=np.uint16)
    return replace(samples, languages=np.tile(both, (samples.rows, 1)))
