"""Text in three languages of our own making, and its translations: a translated word is the same letters backwards, or
in the next place of the alphabet; corpora of both kinds, with one tokenizer."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions, PairFields
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Kind
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEXT = str.maketrans(LETTERS, LETTERS[1:] + LETTERS[0])
LANGUAGES: dict[str, Callable[[str], str]] = {
    "en": lambda text: text,
    "re": lambda text: " ".join(word[::-1] for word in text.split()),
    "up": lambda text: text.lower().translate(NEXT),
}
SOURCES = {"en": ("en",), "re": ("re",), "en-re": ("en", "re"), "en-up": ("en", "up")}
"""Each with its languages, as a recipe says it."""


def prepare_translations(
    folder: Path,
    sentences: Sequence[str],
    *,
    kind: Kind = "wordpiece",
    vocabulary: int = 400,
    heldout: float = 0.1,
    block_tokens: int = 512,
) -> None:
    """`folder`/tokenizer, and a corpus for each of `SOURCES` in a folder of its name. Plain text is of 5 sentences a
    document, and there is less of `re` than of `en`; pairs come from a table with a column a language."""
    options = BuildOptions(heldout_fraction=heldout, block_tokens=block_tokens)
    known = [translate(sentence) for translate in LANGUAGES.values() for sentence in sentences]
    tokenizer = train_tokenizer(kind, known, vocabulary, TokenizerOptions(specials="bert"), allow_fewer_ids=True)
    save_tokenizer(tokenizer, f"{folder}/tokenizer")
    for name, languages in SOURCES.items():
        if len(languages) == 1:
            text = folder / f"{name}.jsonl"
            part = sentences if name == "en" else sentences[: len(sentences) // 3]
            _write_documents(text, [LANGUAGES[name](sentence) for sentence in part])
            _build(text, folder / name, folder, options)
        else:
            query, positive = languages
            table = folder / f"{name}.tsv"
            _write_pairs(table, sentences, languages)
            pairs = PairFields(query=query, positive=positive)
            _build(table, folder / name, folder, options.model_copy(update={"pairs": pairs}))


def source_settings(folder: Path, heldout: float = 0.1) -> str:
    """A recipe's `corpus` over these sources."""
    sources = {name: {"uri": f"{folder}/{name}", "languages": [*languages]} for name, languages in SOURCES.items()}
    return f"corpus={json.dumps({'sources': sources, 'heldout': {'fraction': heldout}})}"


def _write_documents(path: Path, sentences: Sequence[str]) -> None:
    documents = (" ".join(sentences[start : start + 5]) for start in range(0, len(sentences), 5))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), "utf-8")


def _write_pairs(path: Path, sentences: Sequence[str], languages: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(languages)
        table.writerows([LANGUAGES[name](sentence) for name in languages] for sentence in sentences)


def _build(text: Path, out: Path, folder: Path, options: BuildOptions) -> None:
    build_corpus([str(text)], str(out), f"{folder}/tokenizer", options, lambda progress: None)
