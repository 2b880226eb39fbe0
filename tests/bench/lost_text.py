"""What ten tokenizers lose of ten languages, in characters, beside a count that is made in another way.

    python tests/bench/lost_text.py

Text: names of countries and languages in each (CLDR, from babel). Ours: `data_service.tokenizers.loss`. Beside it, by
transformers alone: characters in unknown tokens, from offsets; and letters that the normalised text lacks, as multisets
of code points in decomposed form, so that a letter with two marks may count three times there.
"""

import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from random import Random

from babel import Locale
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_service.tokenizers.check import measure_loss
from data_service.tokenizers.load import load_tokenizer
from tests.support.data.tokenizer_folders import FOLDERS

TOKENIZERS = (
    *("bert-uncased", "bert-cased", "roberta", "albert", "xlnet"),
    *("deberta-v3", "xlm-roberta", "llama-3", "gemma", "german"),
)
LANGUAGES = ("en", "de", "vi", "ru", "ar", "fa", "hi", "ta", "th", "zh")
_CHANGES = ("case", "marks", "width", "joiners", "other")


def text_of(language: str) -> str:
    """Return some ten thousand characters of a language."""
    locale, random = Locale.parse(language), Random(language)
    names = [name for name in (*locale.territories.values(), *locale.languages.values()) if name]
    return "\n".join(" ".join(random.choices(names, k=8)) for _ in range(120))


def _letters(text: str) -> Counter[str]:
    decomposed = unicodedata.normalize("NFD", text)
    return Counter(c for c in decomposed if not c.isspace() and c != "\u2581")


def counted_beside(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, int]:
    """Return (characters in unknown tokens, letters missing from the normalised text), without our code."""
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    unknown = sum(
        stop - start
        for i, (start, stop) in zip(read.input_ids, read.offset_mapping, strict=True)
        if i == tokenizer.unk_token_id
    )
    normalizer = tokenizer.backend_tokenizer.normalizer
    normal = text if normalizer is None else normalizer.normalize_str(text)
    return unknown, (_letters(text) - _letters(normal)).total()


def main() -> None:
    print("tokenizer language: characters; unknown ours = beside; changed ours, beside; white space, bytes")
    for name in TOKENIZERS:
        folder = FOLDERS[name](Path(tempfile.mkdtemp()))
        ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
        for language in LANGUAGES:
            text = text_of(language)
            loss = measure_loss(ours, [text])
            unknown, changed = counted_beside(theirs, text)
            mine = {kind: loss.share(kind) for kind in _CHANGES if kind in loss.lost}
            size = loss.characters
            print(
                f"{name:13} {language:3} {size:6,}  unknown {loss.share('unknown'):6.2%} {unknown / size:6.2%}  "
                f"changed {sum(mine.values()):6.2%} {changed / size:6.2%}  "
                f"spaces {loss.share('white_space'):5.2%}  bytes {loss.share('bytes'):6.2%}  "
                + ", ".join(f"{kind} {share:.2%}" for kind, share in mine.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
