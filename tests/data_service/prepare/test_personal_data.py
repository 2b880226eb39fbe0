"""Personal data: every public address is replaced, whatever stands around it, and no byte of anything else changes."""

import random
import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

import pytest

from data_service.prepare.documents import Document
from data_service.prepare.personal_data import Pii, find_possible_ips

EMAIL, IP = "\ue000", "\ue001"  # which no text has
WORDS = (
    "host",
    "the",
    "from",
    "é",
    "adres",
    "地址",
    "адрес",
    "x",
    "Then",
    "=",
    "->",
    "1,000",
    "3.14",
    "50%",
    "…",
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789"


def replaced(text: str, **settings: bool) -> str:
    stage = Pii(stage="pii", email_replacement=EMAIL, ip_replacement=IP, **settings)
    return stage.filter_document(Document("a", text, "s")).text


def public4(draw: random.Random) -> str:
    while not (address := IPv4Address(draw.getrandbits(32))).is_global:
        pass
    return str(address)


def public6(draw: random.Random) -> str:
    while True:
        groups = [draw.choice((0, 0, draw.getrandbits(16))) for _ in range(7)]
        first = draw.randrange(0x2000, 0x4000)
        address = IPv6Address(":".join(f"{group:x}" for group in (first, *groups)))
        if address.is_global:
            return draw.choice((str(address), str(address).upper(), address.exploded))


def private(draw: random.Random) -> str:
    start = draw.choice(("10.", "127.", "192.168.", "172.16.", "169.254.", "0."))
    return ".".join([*start.strip(".").split("."), *(str(draw.randrange(256)) for _ in range(3))][:4])


def name(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(1, most)))


def email(draw: random.Random) -> str:
    local = ".".join(name(draw, 8) + draw.choice(("", "", "+tag", "_x", "-y", "'s")) for _ in range(draw.randint(1, 3)))
    domain = "".join(f"{name(draw, 9)}{draw.choice(('', '-a'))}." for _ in range(draw.randint(1, 3)))
    return f"{local}@{domain}{draw.choice(('org', 'co.uk', 'museum', 'xn--p1ai', 'DE'))}"


def dotted(draw: random.Random) -> str:
    return ".".join(str(draw.randint(1, 99)) for _ in range(4))


ADDRESSES: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    lambda draw: (public4(draw), IP),
    lambda draw: (public6(draw), IP),
    lambda draw: (email(draw), EMAIL),
)
AROUND = (
    ("", ""), ("(", ")"), ("[", "]"), ('"', '"'), ("http://", "/path"), ("", ":8080"), ("<", ">"), ("", "."), ("", ","),
    ("mailto:", ""), ("ip=", ""), ("—", "—"), ("是", "的"), ("\t", "\n"), ("...", "..."), ("- ", ": up"),
)  # fmt: skip
OTHERS: tuple[Callable[[random.Random], str], ...] = (
    private,
    lambda draw: f"{draw.choice(('version', 'Section', 'v', 'Ver.', 'sections', '§', 'rev:', 'Table'))} {dotted(draw)}",
    lambda draw: f"sections {dotted(draw)}, {dotted(draw)} and {dotted(draw)}",
    lambda draw: f"section ({dotted(draw)})",
    lambda draw: f"v{dotted(draw)}",
    lambda draw: f"{draw.choice(('nginx/', 'openssl-', 'Firefox/', 'lib_2-'))}{dotted(draw)}",
    lambda draw: f"\n{'.'.join(str(draw.randint(1, 30)) for _ in range(4))}{draw.choice(('', '.'))} Methods",
    lambda draw: f"{dotted(draw)}.{draw.randrange(99)}",
    lambda draw: f"{draw.randint(256, 999)}.{dotted(draw)[:-1].rpartition('.')[0]}",
    lambda draw: f"{draw.randint(256, 999)}.8.8.8",
    lambda draw: f"8.8.8.{draw.randint(256, 99999)}",
    lambda draw: f"0{public4(draw)}",
    lambda draw: f"{public4(draw)}{draw.choice('abz_')}",
    lambda draw: f"{draw.choice('abz_')}{public4(draw)}",
    lambda draw: f"{draw.choice(('1', 'abc', ''))}:{public6(draw)}:1:2:3:4:5:6",
    lambda draw: draw.choice(("std::vector", "a::b", "::1", "fe80::1", "2001:db8::7", "00:1a:2b:3c:4d:5e", "23:59:59")),
    lambda draw: f"{public6(draw)}g",
    lambda draw: f"react@{draw.randint(1, 20)}.{draw.randint(0, 9)}.{draw.randint(0, 9)}",
    lambda draw: draw.choice(("x@w.T", "@home", "a@b", "a@b.c", "@site.org", "a @ site.org", "bob@.org")),
    lambda draw: f"{'l' * 65}@site.org",
)  # fmt: skip


@pytest.mark.parametrize("seed", [*range(40), pytest.param(None, marks=pytest.mark.long)])
def test_addresses_are_replaced_and_nothing_else(seed: int | None) -> None:
    for number in range(25) if seed is not None else range(20_000):
        draw = random.Random(f"{seed} {number}")
        before, after = [], []
        for _ in range(draw.randint(1, 12)):
            word = f"{draw.choice(WORDS)}{draw.choice((' ', '  ', chr(10) + 'so '))}"
            if draw.random() < 0.5:
                raw, expected = draw.choice(ADDRESSES)(draw)
                left, right = draw.choice(AROUND)
                if raw.count(":") > 1 and right == ":8080":  # a ninth group, without brackets
                    left, right = "[", "]:8080"
            else:
                left = right = ""
                raw = expected = draw.choice(OTHERS)(draw)
            before.append(f"{word}{left}{raw}{right} ")
            after.append(f"{word}{left}{expected}{right} ")
        assert replaced("".join(before)) == "".join(after)


@pytest.mark.parametrize(("emails", "ips"), [(True, False), (False, True), (True, True)])
def test_each_kind_can_be_left_alone(emails: bool, ips: bool) -> None:
    raw = ("bob@site.example", "8.8.8.8", "2a00:1450:4001:81b::200e")
    kept = (EMAIL if emails else raw[0], *((IP, IP) if ips else raw[1:]))
    assert replaced(" or ".join(raw), emails=emails, ips=ips) == " or ".join(kept)
    assert replaced(" or ".join(kept), emails=emails, ips=ips) == " or ".join(kept)


def test_a_log_and_a_range() -> None:
    assert replaced("8.8.8.8 - - [10/Oct/2025:13:55:36] GET") == f"{IP} - - [10/Oct/2025:13:55:36] GET"
    assert replaced("8.8.8.0/24 and 8.8.8.8-8.8.8.9") == f"{IP}/24 and {IP}-{IP}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["a.", "a-", "1.2.3.", "2001:", "a@", "version 1.2, ", "x" * 50, "a@b.", "8.8.8.8"])
def test_a_million_characters_take_no_minute(unit: str) -> None:
    """A rule whose time grows with the square would take hours."""
    address = "bob@site.org"
    assert address not in replaced(f"{unit * (1_000_000 // len(unit))} {address}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("unit", "end"), [("8.8.4.4 ", ""), ("1.1.1.1 x ", ""), ("2a00:", "_"), ("2a00:1.", "g")])
def test_a_line_of_many_addresses_takes_no_minute(unit: str, end: str) -> None:
    found = replaced(unit * (400_000 // len(unit)) + end)
    assert (IP in found) == (not end)


# One expression for addresses of both versions, and the whole line before one: right, but slow for long lines.
IP_PATTERN = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)(?:(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![A-Za-z0-9_]|\.[0-9])"
    r"|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:.]*+(?![A-Za-z0-9_]))"
)


def test_what_may_be_an_address_is_found_as_by_one_expression() -> None:
    parts = [*"0128af:._ g-\n", "2a00:", "2001:", "::", "8.8.8.8", "1.2.3.4", "255.", "...", "x ", "é", ":80"]
    for number in range(20_000):
        draw = random.Random(f"spans {number}")
        text = "".join(draw.choices(parts, k=draw.randint(1, 25)))
        assert list(find_possible_ips(text)) == [found.span() for found in IP_PATTERN.finditer(text)]


def test_a_heading_begins_its_line_after_any_number_of_marks() -> None:
    for number in range(2_000):
        draw = random.Random(f"lines {number}")
        text = "".join(draw.choices([*" \t#>*-", "\n", "x", " " * 100, "8.8.8.8"], [9] * 6 + [2, 1, 2, 1], k=12))
        begins = not text.rpartition("\n")[2].strip(" \t#>*-")
        assert replaced(f"{text} 1.1.1.1 Methods").endswith(f" {'1.1.1.1' if begins else IP} Methods")


def test_a_document_without_addresses_is_the_same_object() -> None:
    document = Document("a", "section 1.2.3.4", "s")
    assert Pii(stage="pii").filter_document(document) is document
