"""Random text of many scripts, with what stands between letters."""

from random import Random

# First and last code points of what random texts are made of: controls and ASCII, Latin, combining marks, Greek to
# Arabic, Indic and Thai, jamo, spaces and joiners, signs, kana, Han, Hangul, forms of width, emoji, private use.
_BLOCKS = (
    *((0x00, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0x6FF), (0x900, 0xE7F), (0x1100, 0x11FF)),
    *(
        (0x2000, 0x206F),
        (0x2100, 0x27BF),
        (0x3000, 0x30FF),
        (0x4E00, 0x4E80),
        (0xAC00, 0xAC80),
        (0xFB00, 0xFFEF),
    ),
    *((0x1F300, 0x1F6FF), (0xE000, 0xE010), (0x20, 0x20), (0x09, 0x0D), (0x61, 0x7A)),
)


def random_text(random: Random) -> str:
    """Return up to 60 characters of up to four blocks."""
    blocks = random.choices(_BLOCKS, k=4)
    characters = (chr(random.randint(*random.choice(blocks))) for _ in range(random.randint(0, 60)))
    return "".join(characters)
