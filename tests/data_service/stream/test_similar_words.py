"""The table of similar words is learnt from a corpus's own words: words of one context, as long as each other."""

from pathlib import Path

import numpy as np
import pytest

from data_service.corpus.corpus import open_corpus
from data_service.corpus.remove import documents_by_number, remove_documents
from data_service.corpus.words import WordOptions
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.samples.similar_words import parse_similar_words, read_similar_words
from data_service.stream.similar_words import SimilarWordOptions, write_similar_words
from tests.support.data.chinese import chinese_tokenizer, chinese_tokenizer_folder, made_up_words, write_words
from tests.support.data.raw_text import ignore_progress

SETTINGS = SimilarWordOptions(size=16, window=2, epochs=4, neighbours=8)


def documents_of_topics(words: list[str], count: int) -> list[list[str]]:
    """Each document draws from the words of one topic: all `i` with the same remainder."""
    rng = np.random.default_rng(2)
    topics = [words[topic::4] for topic in range(4)]
    return [[str(word) for word in rng.choice(topics[i % 4], 60)] for i in range(count)]


@pytest.mark.long
def test_similar_words_are_of_one_context_and_length(tmp_path: Path) -> None:
    words = sorted((word for word in made_up_words() if len(word) in (2, 3)), key=len)[:48]
    text = write_words(tmp_path / "text.jsonl", documents_of_topics(words, 240))
    corpus = str(tmp_path / "corpus")
    options = BuildOptions(words=WordOptions(segmenter="field"))
    tokenizer = chinese_tokenizer_folder(tmp_path / "tokenizer")
    build_corpus([str(text)], corpus, tokenizer, options, ignore_progress)
    first, second = str(tmp_path / "first.txt"), str(tmp_path / "second.txt")
    written = write_similar_words([corpus], first, SETTINGS)
    assert write_similar_words([corpus], second, SETTINGS) == written
    assert read_similar_words(first) == read_similar_words(second)
    with pytest.raises(CorpusError, match="exists"):
        write_similar_words([corpus], first, SETTINGS)
    with pytest.raises(CorpusError, match=r"\bword\b"):
        write_similar_words([corpus], str(tmp_path / "third.txt"), SimilarWordOptions(least=10**6))
    topic = {word: words.index(word) % 4 for word in words}
    tokenizer_hash = chinese_tokenizer().hash
    table = parse_similar_words(read_similar_words(first), first)
    assert table.tokenizer == tokenizer_hash
    assert sum(len(of_size.ids) for of_size in table.by_size.values()) == written.words == len(words)
    lines = [line.split("\t") for line in read_similar_words(first).decode().splitlines()[1:]]
    pairs = [(word, other) for _, _, word, other in lines if other]
    assert len(pairs) == written.with_similar > 30
    assert all(len(word) == len(other) and word != other for word, other in pairs)
    assert np.mean([topic[word] == topic[other] for word, other in pairs]) > 0.8
    opened = open_corpus(corpus)
    everything = map(str, range(int(opened.manifest.train.documents.sum())))
    removed = documents_by_number(opened, everything)
    remove_documents(opened, removed, removed_by="x", removed_at=1, reason="asked for")
    with pytest.raises(CorpusError, match=r"\bword\b"):
        write_similar_words([corpus], str(tmp_path / "third.txt"), SETTINGS)
