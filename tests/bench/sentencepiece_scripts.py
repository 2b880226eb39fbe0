"""By language: how often a SentencePiece model with its own character map gives other ids as converted.

    python tests/bench/sentencepiece_scripts.py

A unigram and a BPE model are trained by SentencePiece alone, with its usual map (nmt_nfkc), on names of countries and
languages in forty languages (CLDR, from babel). Each language's lines are encoded as they are, decomposed (NFD), and
with half-width kana and full-width digits: by SentencePiece, by our conversion, and (unigram) by the pieces of
transformers' XLMRobertaTokenizer.
"""

import io
import tempfile
import unicodedata
from pathlib import Path
from random import Random

import sentencepiece
from babel import Locale
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_service.tokenizers.published import read_published
from tests.support.data.all_sorts import LANGUAGES

LINES = 60
_WIDE = str.maketrans(
    "0123456789アイウエオ", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19ｱｲｳｴｵ"
)


def lines_of(language: str) -> list[str]:
    locale, random = Locale.parse(language), Random(language)
    names = [name for name in (*locale.territories.values(), *locale.languages.values()) if name]
    return [" ".join(random.choices(names, k=6)) + f" {random.randrange(10**6)} アイウ" for _ in range(LINES)]


def trained(kind: str, lines: list[str]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        vocab_size=6000,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def by_transformers(model: bytes) -> PreTrainedTokenizerFast:
    folder = Path(tempfile.mkdtemp())
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    return AutoTokenizer.from_pretrained(folder)


def main() -> None:
    lines = {language: lines_of(language) for language in LANGUAGES}
    print(
        f"of {LINES} lines, how many differ from SentencePiece's: as written, decomposed, wide; ours, transformers'"
    )
    for kind in ("unigram", "bpe"):
        model = trained(kind, [line for of_language in lines.values() for line in of_language])
        original = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = read_published({"tokenizer.model": model}, kind)
        theirs = by_transformers(model) if kind == "unigram" else None
        assert ours is not None
        for language, of_language in lines.items():
            found = []
            for form in (
                of_language,
                [unicodedata.normalize("NFD", line) for line in of_language],
                [line.translate(_WIDE) for line in of_language],
            ):
                expected = [original.encode(line, out_type=str) for line in form]
                found.append(
                    [encoding.tokens for encoding in ours.encode_batch(form, add_special_tokens=False)]
                )
                found.append(list(map(theirs.tokenize, form)) if theirs is not None else expected)
                found[-2:] = [sum(a != b for a, b in zip(expected, one, strict=True)) for one in found[-2:]]
            print(f"{kind:8} {language:4}", *(f"{count:3}" for count in found), flush=True)


if __name__ == "__main__":
    main()
