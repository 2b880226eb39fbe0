"""Documents of all sorts, drawn at random from real material: code of Python's library, with tabs and line ends of
Windows, names of countries and languages in forty languages; and verse, tables, DNA, SMILES, and mixtures of these.
"""

import random
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

from babel import Locale

_SPELT = "am ar be bg bn cs da de el en es et fa fi fr gu he hi hu hy id it ja ka km kn ko lo mr my ne pl pt ro ru si"
LANGUAGES = [*_SPELT.split(), "sv", "ta", "te", "th", "tr", "uk", "ur", "vi", "yue", "zh", "zu"]
_SMILES = (
    "C",
    "c1ccccc1",
    "O",
    "N",
    "(=O)",
    "[C@@H]",
    "Cl",
    "Br",
    "#N",
    "/C=C/",
    "[nH]",
    "S(=O)(=O)",
    "1",
    "2",
)
_EMOJI = "🙂👩‍🚀🏳️‍🌈🇩🇪é̂\u200d\u200c\u00ad\ufeff"


@cache
def _names(language: str) -> tuple[str, ...]:
    locale = Locale.parse(language)
    found = [
        *locale.territories.values(),
        *locale.languages.values(),
        *locale.months["format"]["wide"].values(),
    ]
    return tuple(name for name in found if name)


@cache
def _sources() -> tuple[str, ...]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return tuple(path.read_text("utf-8") for path in sorted(library.glob("*.py"))[:60])


def _code(rng: random.Random) -> str:
    lines = rng.choice(_sources()).splitlines()
    first = rng.randrange(len(lines))
    text = "\n".join(lines[first : first + rng.randint(3, 60)])
    return rng.choice([text, text.replace("    ", "\t"), text.replace("\n", "\r\n"), text + "\n\n"])


def _language(rng: random.Random) -> str:
    names = _names(rng.choice(LANGUAGES))
    mark = rng.choice([". ", "。", "।", "؟ ", "! ", "\n", "\n\n"])
    return mark.join(" ".join(rng.choices(names, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 12)))


def _verse(rng: random.Random) -> str:
    lines = [" " * rng.choice([0, 2, 4, 8]) + _language(rng).replace("\n", " ")[:60] for _ in range(12)]
    return rng.choice(["\n", "\n\n", "\r\n"]).join(lines)


def _table(rng: random.Random) -> str:
    gap, names = rng.choice(["\t", " | ", "    ", ","]), _names(rng.choice(LANGUAGES))
    rows = [gap.join([rng.choice(names), f"{rng.random():12.4f}", str(rng.randrange(10**9))]) for _ in range(10)]
    return "\n".join(rows)


def _dna(rng: random.Random) -> str:
    return "\n".join("".join(rng.choices("ACGTN", k=rng.choice([6, 60, 99, 100, 101, 400]))) for _ in range(6))


def _smiles(rng: random.Random) -> str:
    return " ".join("".join(rng.choices(_SMILES, k=rng.randint(2, 20))) for _ in range(8))


def _hostile(rng: random.Random) -> str:
    letters = [chr(rng.choice([rng.randrange(32), rng.randrange(0x250), rng.randrange(0xD800)])) for _ in range(40)]
    return "".join(rng.choices([*letters, " ", "\n", "\t", *_EMOJI], k=rng.randint(1, 200)))


SORTS: dict[str, Callable[[random.Random], str]] = {
    "code": _code,
    "language": _language,
    "verse": _verse,
    "table": _table,
    "dna": _dna,
    "smiles": _smiles,
    "hostile": _hostile,
}


def documents_of_all_sorts(count: int, seed: int) -> list[str]:
    """Return `count` documents that differ and are not blank; one in five is a mixture of two."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        parts = [rng.choice(list(SORTS.values()))(rng) for _ in range(1 + (rng.random() < 0.2))]
        text = rng.choice(["", " ", "\n", "\n\n\t"]).join(parts)
        if text.strip():
            found[text] = None
    return list(found)
