# ruff: noqa: RUF001
"""What is known of the sentences of one language, beside the rules for all.

Chinese and Japanese: a run of marks (full stop, exclamation and question mark, full-width or not; two ellipsis signs,
or six full stops) ends a sentence with the quotation marks and brackets that close behind it, with or without space. It
does not before a mark that goes on (a comma, a colon, a closing mark), so that `“走吧！”，他说` is one sentence; nor
does a narrow mark inside a Latin word or number (`Yahoo!Japan`, `3.5`). A single ellipsis does not end one.

Others: words behind which a full stop ends no sentence; in German also after a number of one or two digits (ordinals).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

Language = Literal["any", "zh", "ja", "de", "es", "fr", "it", "nl", "pt", "ru"]

UNSPACED: tuple[Language, ...] = ("zh", "ja")

_CLOSERS = "\"'”’»›)\\]}」』）】》〉〕"
_GOES_ON = "，、；：,;:。．！？!?…" + _CLOSERS
_LATIN = "A-Za-z0-9"
_UNSPACED_BOUNDARY = re.compile(
    rf"(?:[。！？｡]|…{{2}}|\.{{6}}|(?<![{_LATIN}])[!?]|[!?](?![{_LATIN}])|(?<!\d)．|．(?!\d))"
    rf"[。！？｡!?…．]*+[{_CLOSERS}]*+(?P<space>\s*+)(?=[^\s{_GOES_ON}])"
    rf"|(?<=[{_LATIN}])\.[{_CLOSERS}]*+(?P<latin>\s++)(?=[^\sa-z{_GOES_ON}])"
)
_ORDINAL = re.compile(r"\d{1,2}")
_ABBREVIATIONS: Mapping[Language, str] = {
    "de": "abb abs art bd bzw ca dr evtl geb ggf hrsg inkl jh jhd kap max min mio mrd nr prof red s sog st str tab "
    "tel u usf usw vgl z zit",
    "es": "art av avda cap dr dra ej etc fig gral lic núm pág págs prof profa sr sra srta sta sto tel ud uds vol",
    "fr": "art av boul cap ch dr env etc ex fig me mgr mlle mm mme no p pp prof réf st ste t tél vol",
    "it": "art avv cap dott dr ecc es fig ing nr on pag pagg prof prot sig sigg tab tel vol",
    "nl": "afb art blz bv ca dhr dr drs ds enz fig hfst incl ing ir max mevr min mr mw nl nr prof resp st tab tel vgl",
    "pt": "art av cap dr dra etc ex fig exmo núm pág págs prof profa sr sra srta tel vol",
    "ru": "акад г гг г-н г-жа др им кв млн млрд напр обл пер пл пр проф рис руб см ср ст стр т табл тел тыс ул ч",
}
_KNOWN = {language: frozenset(words.split()) for language, words in _ABBREVIATIONS.items()}


def unspaced_boundaries(line: str) -> Iterator[tuple[int, int]]:
    """(end of a sentence, start of the next) in a line of Chinese or Japanese."""
    for match in _UNSPACED_BOUNDARY.finditer(line):
        yield match.start(match.lastgroup or ""), match.end()


def is_abbreviation(word: str, language: Language) -> bool:
    """Whether a full stop behind `word` ends no sentence in this language."""
    if language == "de" and _ORDINAL.fullmatch(word):
        return True
    return word.lower() in _KNOWN.get(language, ())
