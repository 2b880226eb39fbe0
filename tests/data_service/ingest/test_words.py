"""Words at the build: stored with the tokens, part of the corpus's identity, masked whole; without them, as before."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_service.corpus.corpus import Corpus, open_corpus, verify_corpus
from data_service.corpus.manifest import CorpusManifest
from data_service.corpus.manifest_file import dump_manifest, parse_manifest
from data_service.corpus.reader import read_block
from data_service.corpus.words import WordOptions
from data_service.errors import CorpusError, InputError
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.samples.lane_rows import DirectedBlockText
from data_service.samples.lanes import Lanes
from data_service.samples.masking import MlmMasking
from data_service.samples.pairs import OrderedPairs
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.replacement import Replacement
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.store.open import open_store
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from data_service.types import Level
from tests.support.data.chinese import (
    chinese_tokenizer,
    chinese_tokenizer_folder,
    made_up_documents,
    made_up_words,
    write_words,
)
from tests.support.data.raw_text import Killed, ignore_progress, killed_at

DOCUMENTS = made_up_documents(150)
FIELD = WordOptions(segmenter="field")
ROWS = 40


def options(words: WordOptions | None, **more: object) -> BuildOptions:
    settings = {"heldout_fraction": 0.1, "block_tokens": 1500, "split_bytes": 8192, "words": words}
    return BuildOptions.model_validate(settings | more)


def build(folder: Path, text: Path, settings: BuildOptions, name: str = "corpus") -> CorpusManifest:
    tokenizer = chinese_tokenizer_folder(folder / "tokenizer")
    return build_corpus([str(text)], str(folder / name), tokenizer, settings, ignore_progress)


def longest_match(folder: Path) -> WordOptions:
    (folder / "words.txt").write_text("".join(f"{word} 3\n" for word in made_up_words()), "utf-8")
    return WordOptions(segmenter="longest_match", dictionary=str(folder / "words.txt"))


def words_in(corpus: Corpus) -> list[str]:
    """The words of all documents of both splits, as their tokens spell them."""
    tokenizer, found = chinese_tokenizer(), []
    for table in (corpus.manifest.train, corpus.manifest.heldout):
        for index in range(len(table)):
            block = read_block(corpus.store, table, index)
            begins = block.unit_starts("word")
            assert begins is not None
            starts = [*np.flatnonzero(begins).tolist(), len(block.tokens)]
            found += ["".join(tokenizer.decode(block.tokens[a:b]).split()) for a, b in pairwise(starts)]
    return found


@pytest.mark.long
@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "nested", "spaced", "csv", "parquet"])
def test_words_of_the_input_are_stored(tmp_path: Path, form: str) -> None:
    texts = ["".join(words) for words in DOCUMENTS]
    text = tmp_path / f"text.{'jsonl' if form in ('nested', 'spaced') else form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": texts, "words": DOCUMENTS}), text)
    elif form == "csv":
        text.write_text("text,words\n" + "".join(f"{t},{' '.join(w)}\n" for t, w in zip(texts, DOCUMENTS, strict=True)))
    else:
        forms: dict[str, Callable[[list[str]], object]] = {
            "nested": lambda words: [words[:9], words[9:]],
            "spaced": "  ".join,
        }
        held = forms.get(form, list)
        lines = [json.dumps({"text": t, "words": held(w)}) for t, w in zip(texts, DOCUMENTS, strict=True)]
        data = "\n".join(lines).encode()
        text.write_bytes(zstandard.compress(data) if form.endswith("zst") else data)
    manifest = build(tmp_path, text, options(FIELD))
    assert manifest.words is not None
    assert (manifest.words.segmenter, manifest.words.field, manifest.words.levels) == (
        "field",
        "words",
        ("word",),
    )
    assert sorted(words_in(open_corpus(str(tmp_path / "corpus")))) == sorted(chain.from_iterable(DOCUMENTS))
    assert parse_manifest(dump_manifest(manifest), open_store("again")).fingerprint == manifest.fingerprint
    assert not verify_corpus(str(tmp_path / "corpus")).damage


@pytest.mark.long
def test_words_follow_the_stretches_that_are_held_out(tmp_path: Path) -> None:
    """One long document: parts of it are held out, each with its words."""
    words = [word for document in DOCUMENTS for word in (*document, "。")]
    text = write_words(tmp_path / "text.jsonl", [words])
    manifest = build(tmp_path, text, options(FIELD))
    assert manifest.heldout_rule is not None
    assert manifest.heldout_rule.unit == "stretch"
    assert sorted(words_in(open_corpus(str(tmp_path / "corpus")))) == sorted(words)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"words": ["天", "下"]},
            r"text.jsonl, line 3: field 'words' does not hold the words of the text: word 1 is '下'",
        ),
        ({"words": ["天"]}, r"line 3: field 'words'.*'地'"),
        ({}, r"line 3: field 'words'.*\bnothing\b"),
        ({"words": [1]}, r"line 3: field 'words' holds int, not text"),
    ],
)
def test_words_that_are_not_the_text_are_named(tmp_path: Path, record: dict[str, object], message: str) -> None:
    good = [{"text": "".join(words), "words": words} for words in DOCUMENTS[:40]]
    lines = [*good[:2], {"text": "天地"} | record, *good[2:]]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    with pytest.raises(InputError, match=message):
        build(tmp_path, text, options(FIELD))
    manifest = build(tmp_path, text, options(FIELD, on_bad_records="skip"))
    assert manifest.counts["skipped"] == 1


@pytest.mark.long
def test_other_words_are_another_corpus(tmp_path: Path) -> None:
    text = write_words(tmp_path / "text.jsonl", DOCUMENTS)
    wanted = options(longest_match(tmp_path))
    first = build(tmp_path, text, wanted)
    (tmp_path / "words.txt").write_text("天地\n", "utf-8")
    with pytest.raises(CorpusError, match="words: "):
        build(tmp_path, text, wanted)
    assert build(tmp_path, text, wanted, "other").fingerprint != first.fingerprint


@pytest.mark.long
def test_corrected_words_of_the_input_are_written_again(tmp_path: Path) -> None:
    """The text stays the same, so that only the words tell that the input changed."""
    cut = [[*"".join(words)] for words in DOCUMENTS]
    text = write_words(tmp_path / "text.jsonl", cut)
    size = text.stat().st_size
    joined = [["".join(words[:2]), *words[2:]] for words in cut]
    tokenizer = chinese_tokenizer_folder(tmp_path / "tokenizer")
    with pytest.raises(Killed):
        build_corpus([str(text)], str(tmp_path / "corpus"), tokenizer, options(FIELD), killed_at("writing", 1))
    write_words(text, joined)
    padding = size - text.stat().st_size  # the same size, so that it is the same build
    text.write_text(text.read_text("utf-8") + " " * (padding - 1) + "\n", "utf-8")
    build(tmp_path, text, options(FIELD))
    longer = [word for word in words_in(open_corpus(str(tmp_path / "corpus"))) if len(word) > 1]
    assert len(longer) >= len(DOCUMENTS)


@pytest.mark.long
def test_without_words_a_corpus_says_nothing_of_them(tmp_path: Path) -> None:
    text = write_words(tmp_path / "text.jsonl", DOCUMENTS)
    plain = build(tmp_path, text, options(None), "plain")
    with_words = build(tmp_path, text, options(FIELD), "words")
    content = json.loads(dump_manifest(plain))["content"]
    assert not {"words"} & {*content, *content["options"]}
    assert "words" not in options(None).identity_settings()
    assert replace(plain, words=with_words.words).fingerprint != plain.fingerprint
    bits = -(-plain.train.tokens // 8).sum()
    more = sum(with_words.shard_sizes.values()) - sum(plain.shard_sizes.values())
    members = len(plain.train) + len(plain.heldout)
    assert more < bits + members * 1500 + 2 * 10240  # a bit a token, and a member of a tar for each block
    plain_corpus, other = (open_corpus(str(tmp_path / name)) for name in ("plain", "words"))
    for index in range(len(plain.train)):
        first, second = (read_block(c.store, c.manifest.train, index) for c in (plain_corpus, other))
        np.testing.assert_array_equal(first.tokens, second.tokens)
        assert not first.units


def stream_of(folder: Path, manifest: CorpusManifest, **settings: object) -> StreamSpec:
    tokenizer = chinese_tokenizer()
    source = SourceSpec(name="text", uri=str(folder / "corpus"), manifest_fingerprint=manifest.fingerprint)
    fields = {
        "sources": (source,),
        "length": 64,
        "special": tokenizer.special,
        "never_masked": tuple(int(i) for i in np.flatnonzero(tokenizer.special_mask)),
        "vocab_size": tokenizer.vocab_size,
        "seed": 3,
    }
    return StreamSpec.model_validate(fields | settings)


def chosen_units(folder: Path, spec: StreamSpec, level: Level) -> tuple[int, int]:
    """How many units of more than one token have targets, and how many of these are targets as a whole, in what the
    rows hold of them: said plainly, token by token of the text behind each row."""
    stream, corpus = Stream(spec), open_corpus(str(folder / "corpus"))
    rows = stream.read(0, 0, ROWS)
    blocks = [read_block(corpus.store, corpus.manifest.train, i) for i in range(len(corpus.manifest.train))]
    starts = [block.unit_starts(level) for block in blocks]
    targets = np.zeros(len(rows.tokens), dtype=bool)
    targets[rows.target_positions] = True
    restored = rows.tokens.copy()
    restored[rows.target_positions] = rows.target_ids
    is_text = ~np.isin(restored, (spec.special.cls, spec.special.sep))
    touched = whole = 0
    for number in range(ROWS):
        text, row = stream.sample_text(0, number), slice(rows.offsets[number], rows.offsets[number + 1])
        chosen = iter(targets[row][is_text[row]].tolist())
        begins, sentences = starts[text.block], set(blocks[text.block].sentences.tolist())
        assert begins is not None
        for stretch in text.stretches:
            units: list[list[bool]] = []
            for place in stretch:
                if not units or begins[place] or place in sentences:
                    units.append([])
                units[-1].append(next(chosen))
            found = [unit for unit in units if len(unit) > 1 and any(unit)]
            touched, whole = touched + len(found), whole + sum(map(all, found))
        assert not list(chosen)
    return touched, whole


@pytest.fixture(scope="module")
def with_lexicon(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CorpusManifest]:
    """A corpus with words of its input, and every second of the frequent words an entity, the others phrases."""
    folder = tmp_path_factory.mktemp("lexicon")
    entries = [f"{word}\t{('phrase', 'entity')[number % 2]}\n" for number, word in enumerate(made_up_words()[:80])]
    (folder / "lexicon.txt").write_text("".join(entries), "utf-8")
    words = FIELD.model_copy(update={"lexicon": str(folder / "lexicon.txt")})
    return folder, build(folder, write_words(folder / "text.jsonl", DOCUMENTS[:60]), options(words))


@pytest.mark.parametrize("unit", ["whole_word", "ngram", "span", "phrase", "entity"])
@pytest.mark.parametrize("packing", ["full_sentences", "ordered_pair"])
def test_stored_words_are_masked_whole(with_lexicon: tuple[Path, CorpusManifest], unit: str, packing: str) -> None:
    folder, manifest = with_lexicon
    masking = MlmMasking.model_validate({"unit": unit, "replace": Replacement(mask=1, random=0, keep=0)})
    rows = OrderedPairs(packing="ordered_pair") if packing == "ordered_pair" else {"packing": packing}
    spec = stream_of(folder, manifest, masking=masking, input=rows)
    touched, whole = chosen_units(folder, spec, masking.unit_level or "word")
    assert touched > 10
    assert whole == touched


def test_permuted_prediction_takes_stored_words_whole(tmp_path: Path) -> None:
    text = write_words(tmp_path / "text.jsonl", DOCUMENTS[:60])
    manifest = build(tmp_path, text, options(FIELD))
    block = read_block(open_corpus(str(tmp_path / "corpus")).store, manifest.train, 0)
    spec = stream_of(tmp_path, manifest, input=Lanes(packing="lanes", reuse=16), masking=PermutedPrediction(predict=12))
    reading = DirectedBlockText.from_block(
        block, spec.special, spec.never_masked, Corpora(spec).word_start_table, backward=True
    )
    words = [
        (reading.flags[: reading.size] & 1).astype(bool),
        (reading.flags[reading.size :] & 1).astype(bool),
    ]
    begins = block.unit_starts("word")
    assert begins is not None
    expected = []
    for place in range(len(block.tokens)):
        if place in block.sentences[block.documents[1:]]:
            expected.append(True)  # the end of a document
        expected.append(bool(begins[place]) or place in block.sentences)
    expected.append(True)
    assert words[0].tolist() == expected
    assert (words[0].sum(), len(words[0])) == (words[1].sum(), reading.size)


def test_units_of_a_lexicon_that_are_not_stored_are_refused(tmp_path: Path) -> None:
    text = write_words(tmp_path / "text.jsonl", DOCUMENTS[:40])
    manifest = build(tmp_path, text, options(FIELD))
    spec = stream_of(tmp_path, manifest, masking=MlmMasking(unit="entity"))
    with pytest.raises(CorpusError, match=r"\bentity\b.*lexicon"):
        Corpora(spec).word_start_table  # noqa: B018
