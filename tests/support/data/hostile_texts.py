"""Documents at random that filters of quality find hard: parts of spaCy's special cases apart and together, odd white
space and characters, several languages, lists, code, long words, repeated lines, paragraphs and runs of words."""

import random
from collections.abc import Sequence

FACES = tuple(":;=8()[]-x>o3D'")
_ODD = """
\u200b \ufeff e\u0301 😀 👩\u200d👩\u200d👧 \x00 \x07 ' " \u2019 “ ” ; : , . ! ? 。 \uff1f … ... - -- — \u2013 • * # ##
{ } [1] [edit] [citation needed] «q» (a) [b] <d> foo@bar.com $5 €3 10:30 3.5km 1,000 x=1; a.b() http://a.b/c a/b
http://x.y?z=1&q e.g. U.S.A. don't it's I'm cannot ORTH IS_PUNCT javascript JavaScript lorem lorem[1] ipsum Lorem
cookies privacy policy uses ab abc bc c a 日本語 中文。 ไทย ภาษา हिन्दी। العربية، русский straße naïve Ελλάδα ﷺ İ ǅ ٣٤ x²
"""
_PLAIN = """
the be to of and that have with a in is it for as was on are by this from or an which at not but what all were when
we there can more if no out so said people one time word line page house river bank table number year
"""
ODD, PLAIN = _ODD.split(), _PLAIN.split()
SPACES = (
    "",
    " ",
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\t",
    "\xa0",
    " \n",
    "\r\n",
    "\u3000",
    "\x1c",
    "\x85",
    "\u2028",
    "\n\n",
)
ENDS = (
    ".",
    ".",
    "!",
    "?",
    '"',
    "'",
    "...",
    "…",
    ":",
    "",
    "",
    "。",
    " [2]",
    ". [3]",
    ".)",
    '." Then more. And more',
)


def hostile_text(drawn: random.Random, parts: Sequence[str] = ()) -> str:
    """Return a text. `parts`: words of special cases."""
    return drawn.choice((_jumble, _page, _page, _page))(drawn, parts)


def _jumble(drawn: random.Random, parts: Sequence[str]) -> str:
    words = drawn.choice((parts or PLAIN, FACES, ODD, (*FACES, *ODD, *PLAIN)))
    spaces = drawn.choice((SPACES, (" ",), ("", " ")))
    return "".join(drawn.choice(words) + drawn.choice(spaces) for _ in range(drawn.choice((2, 8, 30, 150))))


def _page(drawn: random.Random, parts: Sequence[str]) -> str:
    """Lines and paragraphs; how many are odd, short, repeated, listed, belongs to the page."""
    odd, again, listed, short, runs = (drawn.choice((0, 0, 0, 0.02, 0.1, 0.4, 0.9)) for _ in range(5))
    mark, ends = drawn.choice(("- ", "• ", "  -", "* ", "# ", "1. ")), drawn.sample(ENDS, drawn.randint(1, 4))
    phrases = [[_word(drawn, parts, odd) for _ in range(drawn.randint(2, 12))] for _ in range(2)]
    lines = list[str]()
    for _ in range(drawn.choice((1, 3, 6, 20, 40))):
        if lines and drawn.random() < again:
            lines.append(drawn.choice(lines))
            continue
        words = list[str]()
        for _ in range(drawn.randint(1, 3) if drawn.random() < short else drawn.randint(3, 20)):
            words += drawn.choice(phrases) if drawn.random() < runs / 8 else [_word(drawn, parts, odd)]
        lines.append((mark if drawn.random() < listed else "") + " ".join(words) + drawn.choice(ends))
    return "".join(line + drawn.choice(("\n", "\n", "\n", "\n\n", "\n\n\n", "\r\n")) for line in lines)


def _word(drawn: random.Random, parts: Sequence[str], odd: float) -> str:
    if drawn.random() < odd:
        return (
            "y" * drawn.randint(1, 1_200) if drawn.random() < 0.02 else drawn.choice(drawn.choice((ODD, parts or ODD)))
        )
    if drawn.random() < 0.4:
        return "".join(drawn.choices("aeioubcdlmnrst", k=drawn.randint(2, 10)))
    return drawn.choice(PLAIN)
