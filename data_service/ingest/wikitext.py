"""Turns wikitext into plain text: what a reader of the article reads as running text.

Templates, tables, references, galleries, formulas, comments, and links to pictures and categories are left out.
Headings stay as lines of their own, links as their words.

Links, headings and entities are read by mwparserfromhell. It takes hours for a page of 100 KB that opens thousands of
templates, tags or brackets and closes none, as a broken page may. So templates, tables and tags are removed before, in
linear time, and unpaired brackets are escaped.
"""

import re
from collections.abc import Iterator
from typing import Any

# Names of tags whose content is left out, as alternatives of a regular expression.
_OMITTED_TAGS = (
    "table|ref|references|gallery|math|chem|ce|score|timeline|imagemap|graph|hiero|inputbox|categorytree|templatedata"
    "|style|script"
)
_BLOCK_TAGS = "br|p|div|li|ul|ol|dl|dt|dd|hr|blockquote|poem|center"  # a line end replaces these tags
_INLINE_TAGS = (  # these tags are removed, their content stays
    "b|i|u|s|small|big|sub|sup|span|font|em|strong|code|tt|kbd|var|samp|cite|q|abbr|dfn|bdi|bdo|del|ins|strike|ruby|rb"
    "|rp|rt|mark|noinclude|includeonly|onlyinclude|section|time|wbr|pre|source|syntaxhighlight|nowiki|h1|h2|h3|h4|h5|h6"
    f"|caption|tr|td|th|{_OMITTED_TAGS}"
)
_OMITTED_TAG_START = re.compile(rf"<!--|<({_OMITTED_TAGS})\b[^<>]*>", re.IGNORECASE)
_BLOCK_TAG = re.compile(rf"</?(?:{_BLOCK_TAGS})\b[^<>]*>", re.IGNORECASE)
_INLINE_TAG = re.compile(rf"</?(?:{_INLINE_TAGS})\b[^<>]*>", re.IGNORECASE)
_TEMPLATE_BRACES = re.compile(r"\{\{+|\}\}+")
_TABLE_MARKUP = re.compile(r"^[ \t:]*(\{\|)|^[ \t]*(\|\})", re.MULTILINE)
_LIST_MARKERS = re.compile(r"^[*#:;]+", re.MULTILINE)
_LINK_BRACKETS = re.compile(r"\[\[|\]\]")
_EXTERNAL_LINK = re.compile(r"\[((?:https?:|ftp:|mailto:)?//?[^\[\]\n]*)\]|\[")
_MAX_LINK_DEPTH = 16  # greatest depth of nested links, such as in captions of pictures
_BEHAVIOR_SWITCH = re.compile(r"__[^\Wa-z]{3,40}?__")  # switches such as __TOC__
_EMPHASIS_QUOTES = re.compile(r"'{2,}")  # italics and bold face
# Parentheses that a removed template left empty, also full-width ones.
_EMPTY_PARENTHESES = re.compile(" ?[(\uff08][\\s,;:\u3001\uff0c\uff1b]*[)\uff09]")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def wikitext_to_plain_text(source: str, hidden_namespaces: frozenset[str]) -> str:
    """Return the plain text of an article.

    Args:
        source: the wikitext.
        hidden_namespaces: lower-case names of the namespaces whose links are left out: pictures and categories.

    Raises:
        ValueError: mwparserfromhell cannot parse it.
    """
    from mwparserfromhell import parse
    from mwparserfromhell.parser import ParserError

    try:
        code = parse(_strip_all_but_links(source), skip_style_tags=True)
    except ParserError as error:
        raise ValueError(f"mwparserfromhell cannot read the wikitext of the page: {error}") from error
    text = _EMPTY_PARENTHESES.sub("", "".join(_visible_parts(code, hidden_namespaces)))
    lines = (_SPACES.sub(" ", line).strip() for line in text.split("\n"))
    kept = (line if any(map(str.isalnum, line)) else "" for line in lines)
    return _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip()


def _strip_all_but_links(source: str) -> str:
    """Return the wikitext without tags, templates and tables; other `<` and unpaired brackets are escaped."""
    text = "".join(_text_outside_tags(source))
    text = _INLINE_TAG.sub("", _BLOCK_TAG.sub("\n", text))
    text = "".join(_text_outside_templates(text)).replace("{{", "").replace("}}", "")
    text = "".join(_text_outside_tables(text)).replace("{|", "")
    text = _EMPHASIS_QUOTES.sub("", _LIST_MARKERS.sub("", _BEHAVIOR_SWITCH.sub("", text)))
    return "".join(_escape_unpaired_links(text)).replace("<", "&lt;")


def _text_outside_tags(text: str) -> Iterator[str]:
    """Yield the text outside of comments and of the tags whose content is left out."""
    lowered, at = text.lower() if len(text.lower()) == len(text) else text, 0
    unclosed: set[str] = set()  # end tags that do not occur in the rest of the text
    for opening in _OMITTED_TAG_START.finditer(text):
        if opening.start() < at or opening[0].endswith("/>"):
            continue
        end = "-->" if opening[1] is None else f"</{opening[1].lower()}>"
        if end in unclosed:
            continue
        if (closing := lowered.find(end, opening.end())) < 0:
            unclosed.add(end)
            continue
        yield text[at : opening.start()]
        at = closing + len(end)
    yield text[at:]


def _text_outside_templates(text: str) -> Iterator[str]:
    """Yield the text outside of `{{...}}` and `{{{...}}}`; unpaired braces count as text."""
    # For each run of opening braces: its offset, and how many of its braces are not closed yet.
    open_at: list[tuple[int, int]] = []
    cuts: list[tuple[int, int]] = []
    for run in _TEMPLATE_BRACES.finditer(text):
        if run[0][0] == "{":
            open_at.append((run.start(), len(run[0])))
            continue
        left = len(run[0])
        while left > 1 and open_at:
            start, count = open_at.pop()
            closed = min(count, left)
            left -= closed
            if count - closed > 1:
                open_at.append((start, count - closed))
            cuts.append((start + max(0, count - closed), run.end() - left))
    yield from _text_outside_ranges(text, cuts)


def _text_outside_tables(text: str) -> Iterator[str]:
    """Yield the text outside of `{| ... |}`."""
    open_at: list[int] = []
    cuts: list[tuple[int, int]] = []
    for mark in _TABLE_MARKUP.finditer(text):
        if mark[1]:
            open_at.append(mark.start())
        elif open_at:
            cuts.append((open_at.pop(), mark.end()))
    yield from _text_outside_ranges(text, cuts)


def _text_outside_ranges(text: str, cuts: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the text outside of the ranges `cuts`, which may be nested."""
    at = 0
    for start, stop in sorted(cuts):
        if start >= at:
            yield text[at:start]
        at = max(at, stop)
    yield text[at:]


def _escape_unpaired_links(text: str) -> Iterator[str]:
    """Yield the text, with unpaired brackets and too deeply nested links escaped."""
    open_at: list[int] = []
    paired: set[int] = set()
    for mark in _LINK_BRACKETS.finditer(text):
        if mark[0] == "[[":
            open_at.append(mark.start())
        elif open_at and len(open_at) <= _MAX_LINK_DEPTH:
            paired |= {open_at.pop(), mark.start()}
        elif open_at:
            open_at.pop()
    at = 0
    for mark in _LINK_BRACKETS.finditer(text):
        yield _EXTERNAL_LINK.sub(_escape_lone_bracket, text[at : mark.start()])
        yield mark[0] if mark.start() in paired else _escape_brackets(mark[0])
        at = mark.end()
    yield _EXTERNAL_LINK.sub(_escape_lone_bracket, text[at:])


def _escape_lone_bracket(link: re.Match[str]) -> str:
    return _escape_brackets("[") if link[1] is None else link[0]


def _escape_brackets(brackets: str) -> str:
    return "".join(f"&#{ord(each)};" for each in brackets)


def _visible_parts(code: Any, hidden_namespaces: frozenset[str]) -> Iterator[str]:
    """Yield the visible parts of parsed wikitext, in order."""
    from mwparserfromhell import nodes

    for node in code.nodes:
        match node:
            case nodes.Text():
                yield node.value
            case nodes.HTMLEntity():
                yield _SURROGATE.sub("\ufffd", node.normalize())
            case nodes.Wikilink():
                if not _is_in_hidden_namespace(str(node.title), hidden_namespaces):
                    yield from _visible_parts(node.title if node.text is None else node.text, hidden_namespaces)
            case nodes.ExternalLink():
                if not node.brackets:
                    yield str(node.url)
                elif node.title is not None:
                    yield from _visible_parts(node.title, hidden_namespaces)
            case nodes.Heading():
                yield "\n"
                yield from _visible_parts(node.title, hidden_namespaces)
                yield "\n"


def _is_in_hidden_namespace(title: str, hidden_namespaces: frozenset[str]) -> bool:
    space, colon, _ = title.partition(":")
    return bool(colon) and space.strip().replace("_", " ").lower() in hidden_namespaces
