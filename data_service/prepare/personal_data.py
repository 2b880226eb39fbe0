"""Replaces e-mail addresses and public IP addresses, but not numbers that only look like an IP address.

An address is never part of a longer word or dotted number. Four dotted numbers are not taken for an IPv4 address:

- if one of them is above 255 or has a leading zero, or if the address is not public;
- after a word such as "section" or "version" (also in a list of such numbers), or after a name with a hyphen or slash
  ("nginx/1.2.3.4");
- at the start of a line before a word, if all numbers are at most `MAX_OUTLINE_NUMBER`: the number of a heading.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Literal

from data_service.formats import StrictRecord
from data_service.prepare.documents import Document

MAX_OUTLINE_NUMBER = 30  # largest number of a chapter or section in a heading such as 1.2.3.4
_CONTEXT_CHARACTERS = 80  # length of the text before an address that is examined
_DOMAIN_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL_PATTERN = re.compile(
    r"(?<![A-Za-z0-9_.+%-])([A-Za-z0-9_.+%-][A-Za-z0-9!$%'*+^_`{|}~.-]{0,63})@"
    rf"(?:{_DOMAIN_LABEL}\.)+(?:xn--[A-Za-z0-9-]{{1,58}}[A-Za-z0-9]|[A-Za-z]{{2,63}})(?!-?[A-Za-z0-9_]|\.[A-Za-z0-9])"
)
# What belongs to the sentence at the beginning of a match of `_EMAIL_PATTERN`.
_PUNCTUATION_BEFORE_EMAIL = re.compile(r"(?:.*\.\.)?[-.+%]*")
# Four dotted numbers, or the first group of an IPv6 address: public ones are all in 2000::/3.
_IP_START = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)(?:(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![A-Za-z0-9_]|\.[0-9])"
    r"|(?P<group>[23][0-9A-Fa-f]{3}:))"
)
_IPV6_REST = re.compile(r"[0-9A-Fa-f:.]*+")  # what may follow the first group of an IPv6 address
_WORD_CHARACTER = re.compile(r"[A-Za-z0-9_]")
_WORD_AFTER = re.compile(r"\.?[ \t]+[^\W\d_]")  # a word in the same line, after the number of a heading
_MARKS_BEFORE_HEADING = " \t#>*-"  # characters that may stand before a heading in its line
_NUMBERING_BEFORE = re.compile(  # text before four dotted numbers that are a version or a section
    r"(?:(?:\b(?:version|ver|v|release|revision|rev|build|firmware|(?:sub)?section|sec|sect|chapter|chap|clause|article"
    r"|art|paragraph|para|appendix|annex|figure|fig|table|item|step|rule|part)s?|§)[.:]?\s*\(?"
    r"(?:[0-9]+(?:\.[0-9]+)+\s*(?:,|;|&|and|or|to|[-\u2013])\s*)*|[A-Za-z]\w*[-/])\Z",
    re.IGNORECASE,
)
# The group before a match shows that the match lies inside a longer IPv6 address.
_IPV6_GROUP_BEFORE = re.compile(r"(?<![A-Za-z0-9_])[0-9A-Fa-f]{0,4}:\Z")


class Pii(StrictRecord):
    """Replaces e-mail addresses at domain names, and public IPv4 and IPv6 addresses. Drops no documents."""

    stage: Literal["pii"]
    emails: bool = True
    ips: bool = True
    email_replacement: str = "email@example.com"
    ip_replacement: str = "22.214.171.124"

    def filter_document(self, document: Document) -> Document:
        """Return the document with its addresses replaced."""
        text = document.text
        if self.emails:
            text = _EMAIL_PATTERN.sub(self._replace_email, text)
        if self.ips:
            text = "".join(self._parts_without_ips(text))
        return document if text == document.text else replace(document, text=text)

    def _replace_email(self, found: re.Match[str]) -> str:
        """Return what replaces a match. It stays if it is no address: all punctuation, or a dot before the @."""
        before = _PUNCTUATION_BEFORE_EMAIL.match(found[1])
        kept = before[0] if before else ""
        return found[0] if kept == found[1] or found[1].endswith(".") else kept + self.email_replacement

    def _parts_without_ips(self, text: str) -> Iterator[str]:
        """Yield the text in parts, with public IP addresses replaced."""
        copied = 0
        for start, end in find_possible_ips(text):
            found = text[start:end]
            address = found.rstrip(".")
            if address.endswith(":") and (address.endswith(":::") or not address.endswith("::")):
                address = address[:-1]
            if _is_public(address) and not _is_not_address(text, start, end, ip_version=6 if ":" in address else 4):
                yield text[copied:start] + self.ip_replacement
                copied = start + len(address)
        yield text[copied:]


def find_possible_ips(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every possible IP address, including punctuation after it.

    Many groups in a run of IPv6 characters can start an address. The end of the run is searched only once; otherwise
    the time would be quadratic in the length of a run.
    """
    at = run_end = 0
    while found := _IP_START.search(text, at):
        at = found.end()
        if found["group"]:
            run_end = run_end if at <= run_end else next(_IPV6_REST.finditer(text, at)).end()
            if _WORD_CHARACTER.match(text, run_end):
                at = found.start() + 1
                continue
            at = run_end
        yield found.start(), at


def _is_public(address: str) -> bool:
    try:
        return ip_address(address).is_global
    except ValueError:
        return False


def _is_not_address(text: str, start: int, end: int, *, ip_version: int) -> bool:
    """Return whether four dotted numbers are the number of a version, section or heading; for `ip_version` 6, whether a
    longer sequence of groups contains the match."""
    context = text[max(0, start - _CONTEXT_CHARACTERS) : start]
    if ip_version == 6:
        return _IPV6_GROUP_BEFORE.search(context) is not None
    if _NUMBERING_BEFORE.search(context):
        return True
    outline = max(map(int, text[start:end].split("."))) <= MAX_OUTLINE_NUMBER
    return outline and _WORD_AFTER.match(text, end) is not None and _begins_line(text, start)


def _begins_line(text: str, start: int) -> bool:
    """Return whether the line of `start` has only white space and heading marks before it."""
    while start and text[start - 1] in _MARKS_BEFORE_HEADING:
        start -= 1
    return not start or text[start - 1] == "\n"
