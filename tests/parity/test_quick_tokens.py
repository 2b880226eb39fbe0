"""Quicker libraries against the definition, over the tokenizers that people have and text of all sorts: what is not
left to the definition has its ids, and sentences begin with the same tokens.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from data_service.ingest.blocks import encode_documents
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.loss import LossMeter
from data_service.tokenizers.quick import TextEncoder
from data_service.tokenizers.tokenizer import Tokenizer
from tests.support.data.all_sorts import documents_of_all_sorts
from tests.support.data.random_text import random_text
from tests.support.data.tokenizer_folders import FOLDERS

STRINGS = int(os.environ.get("MASKFLEET_STRINGS", "40000"))  # of the long form, for each tokenizer
DEFAULT = ("bert-uncased", "modernbert", "deberta-v3", "t5")
MARKS_AROUND_A_JOINER = "a \ufc88\u0328\u200c\u030b b"  # two words for T5 and XLM-R, whose marks are placed together
_BATCH = 500
DEFAULT_STRINGS = 200


def _texts(random: Random, seed: int, count: int) -> list[str]:
    """A batch: random characters, words joined by odd spaces, and a few documents."""
    texts = [random_text(random) for _ in range(count - 40)]
    texts += [random.choice([" ", "\n", "\t", "  ", "\u3000", ""]).join(random.sample(texts, 3)) for _ in range(20)]
    return texts + list(documents_of_all_sorts(20, seed)) + [MARKS_AROUND_A_JOINER]


def _check(tokenizer: Tokenizer, count: int, seed: int) -> Counter[str]:
    encoder, random = TextEncoder(tokenizer), Random(seed)
    for first in range(0, count, _BATCH):
        texts = _texts(random, seed + first // _BATCH, min(_BATCH, count - first))
        meters = LossMeter(tokenizer), LossMeter(tokenizer)
        quick = encode_documents(encoder, texts, meter=meters[0])
        for text, found, expected in zip(
            texts, quick, encode_documents(tokenizer, texts, meter=meters[1]), strict=True
        ):
            np.testing.assert_array_equal(found.tokens, expected.tokens, repr(text))
            assert found.lengths.tolist() == expected.lengths.tolist(), repr(text)
            assert found.moved == expected.moved
        assert meters[0].total() == meters[1].total()
    assert not any("differs" in library for library in encoder.counts)
    return encoder.counts


@pytest.mark.parametrize("name", DEFAULT)
def test_a_quicker_library_gives_the_tokens_of_the_definition(name: str, tmp_path: Path) -> None:
    counts = _check(load_tokenizer(str(FOLDERS[name](tmp_path)), "agreeing"), DEFAULT_STRINGS, 3)
    assert any(not library.startswith("tokenizers") for library in counts)


@pytest.mark.long
@pytest.mark.parametrize("name", FOLDERS)
def test_every_tokenizer_over_many_texts(name: str, tmp_path: Path) -> None:
    seed = Random().randrange(1 << 30)
    print(f"{name}: seed {seed}", file=sys.stderr)
    counts = _check(load_tokenizer(str(FOLDERS[name](tmp_path)), "agreeing"), STRINGS, seed)
    print(f"{name}: {dict(counts)}", file=sys.stderr)
