"""The tokens of a corpus are, document by document, those that `transformers.AutoTokenizer` gives for the whole text,
and the decoded corpus is the text wherever the tokenizer loses nothing.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_service.corpus.corpus import open_corpus
from data_service.corpus.reader import read_block
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.tokenizers import quick
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.loss import KINDS
from tests.support.data.all_sorts import documents_of_all_sorts
from tests.support.data.raw_text import ignore_progress
from tests.support.data.tokenizer_folders import FOLDERS

DEFAULT = ("xlm-roberta", "llama-3")
OPTIONS = BuildOptions(heldout_fraction=0, accept_loss=frozenset(set(KINDS) - {"case", "bytes"}))


@pytest.fixture(autouse=True)
def quick_for_little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "MIN_QUICK_TEXT_BYTES", 0)


def _corpus(folder: Path, tokenizer: Path, texts: list[str]) -> list[list[int]]:
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_corpus([str(folder / "x.jsonl")], str(folder / "c"), str(tokenizer), OPTIONS, ignore_progress)
    corpus, found = open_corpus(str(folder / "c")), []
    for index in range(len(corpus.manifest.train)):
        block = read_block(corpus.store, corpus.manifest.train, index)
        edges = block.sentences[block.documents].tolist()
        found += [block.tokens[start:stop].tolist() for start, stop in pairwise(edges)]
    return found


def _check(name: str, folder: Path, count: int, seed: int) -> None:
    tokenizer = FOLDERS[name](folder)
    theirs, ours = AutoTokenizer.from_pretrained(tokenizer), load_tokenizer(str(tokenizer))
    protected = [piece for role, piece in ours.names.by_role().items() if role != "unk"]
    texts = [text for text in documents_of_all_sorts(count, seed) if not any(name in text for name in protected)]
    expected = [ids for text in texts if (ids := theirs(text, add_special_tokens=False).input_ids)]
    found = _corpus(folder, tokenizer, texts)
    assert len(found) == len(expected)
    differing = [number for number, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert differing == []
    with_tokens = [text for text in texts if theirs(text, add_special_tokens=False).input_ids]
    same = sum(ours.decode(ids) == text for ids, text in zip(found, with_tokens, strict=True))
    if ours.kind == "byte_bpe" and all(ours.decode(ours.encode(text)) == text for text in ("a", "e\u0301")):
        assert same == len(found), "byte-level BPE that neither composes nor begins with a space loses nothing"
    print(
        f"{name}: {len(found)} documents, {sum(map(len, found))} tokens, {same} decode to the text",
        file=sys.stderr,
    )


@pytest.mark.parametrize("name", DEFAULT)
def test_documents_of_all_sorts(tmp_path: Path, name: str) -> None:
    _check(name, tmp_path, 40, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("name", FOLDERS)
def test_two_thousand_documents(tmp_path: Path, name: str) -> None:
    _check(name, tmp_path, 2000, seed=2)
