"""datatrove's filters, called as functions of one document. Nothing else of datatrove is used.

Its blocks are made to be lines of a pipeline: some download, some keep a state from document to document. Here each is
built so that it does neither, and tried on a text before any work starts, which shows what is missing. Filters of
quality have the block's settings, and `quality.py` decides as the block would.
"""

import csv
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from pydantic import Field

from data_service.errors import LibraryChanged, PrepareError
from data_service.formats import StrictRecord
from data_service.ingest.inputs import INSTALL_REMEDY
from data_service.prepare.documents import Document, DropDecision
from data_service.prepare.quality import FILTER_BY_NAME
from data_service.prepare.words import get_splitter

_TESTED_VERSIONS = SpecifierSet(">=0.10.1,<0.11")
_TRIAL_TEXT = "The bank of the river is where they met, and that is what it has to be. " * 8


class GopherQuality(StrictRecord):
    """Gopher's rules for the quality of a text: number and length of words, symbols, bullets, ellipses, stop words.

    `language`: three letters, as datatrove names it, of the rules that find words. Defaults are Gopher's.
    """

    stage: Literal["gopher_quality"]
    language: str = "eng"
    min_doc_words: int = 50
    max_doc_words: int = 100_000
    min_avg_word_length: int = 3
    max_avg_word_length: int = 10
    max_symbol_word_ratio: float = 0.1
    max_bullet_lines_ratio: float = 0.9
    max_ellipsis_lines_ratio: float = 0.3
    max_non_alpha_words_ratio: float = 0.8
    min_stop_words: int = 2
    stop_words: tuple[str, ...] | None = None


class GopherRepetition(StrictRecord):
    """Gopher's rules for repetition: of lines, paragraphs and n-grams within a document."""

    stage: Literal["gopher_repetition"]
    language: str = "eng"
    dup_line_frac: float = 0.3
    dup_para_frac: float = 0.3
    dup_line_char_frac: float = 0.2
    dup_para_char_frac: float = 0.2


class C4Quality(StrictRecord):
    """C4's rules: lines that are short or end in no punctuation go, and documents of too few sentences.

    Documents with a curly bracket or "lorem ipsum" anywhere are dropped, as the paper says (1910.10683, section 2.2).
    C4's own code and datatrove look for both only in lines that other rules kept.
    """

    stage: Literal["c4_quality"]
    language: str = "eng"
    remove_citations: bool = True
    filter_no_terminal_punct: bool = True
    min_num_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1000
    filter_lorem_ipsum: bool = True
    filter_javascript: bool = True
    filter_curly_bracket: bool = True
    filter_policy: bool = True


class FineWebQuality(StrictRecord):
    """FineWeb's own rules: ends of lines, short lines, repeated lines, lists."""

    stage: Literal["fineweb_quality"]
    language: str = "eng"
    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    short_line_thr: float = 0.67
    short_line_length: int = 30
    char_duplicates_ratio: float = 0.01
    new_line_ratio: float = 0.3


class UrlFilter(StrictRecord):
    """Drops documents by their URL: listed domains and URLs, banned words. A document without URL passes.

    Attributes:
        integrated_lists: whether the lists that datatrove brings along count, too.
        domains, urls, banned_words, banned_subwords, soft_banned_words: more of each.
        soft_word_threshold: number of soft banned words that are too many.
    """

    stage: Literal["url_filter"]
    integrated_lists: bool = True
    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    banned_words: tuple[str, ...] = ()
    banned_subwords: tuple[str, ...] = ()
    soft_banned_words: tuple[str, ...] = ()
    soft_word_threshold: int = Field(default=2, ge=1)


DatatroveFilter = GopherQuality | GopherRepetition | C4Quality | FineWebQuality | UrlFilter


def make_datatrove_filter(stage: DatatroveFilter) -> Callable[[Document], Document | DropDecision]:
    """Return the function that decides about documents.

    Raises:
        PrepareError: a package is missing, or there are no rules for the language, or only those of another script.
        LibraryChanged: datatrove is of a version that was not tested.
    """
    _check_version(stage.stage)
    try:
        from loguru import logger

        logger.disable("datatrove")  # loguru would print on standard error what datatrove unpacks
        if not isinstance(stage, UrlFilter):
            _check_script(stage.stage, stage.language)
        decide = _make_filter(stage)
        decide(Document("trial", _TRIAL_TEXT, "trial", url="https://example.org/page"))
    except (ImportError, LookupError, OSError, ValueError) as error:
        message = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise PrepareError(
            f"stage {stage.stage} cannot work: {message}",
            remedy=f"{INSTALL_REMEDY}, or the package that is named here, which only some languages need; if a "
            "language is meant, name one that datatrove has rules for, such as eng",
        ) from error
    return decide


def _check_version(stage: str) -> None:
    try:
        found = version("datatrove")
    except PackageNotFoundError as error:
        raise PrepareError(f"stage {stage} needs datatrove, which is not installed", remedy=INSTALL_REMEDY) from error
    if found not in _TESTED_VERSIONS:
        raise LibraryChanged(
            f"stage {stage} was tested with datatrove {_TESTED_VERSIONS}, and {found} is installed",
            remedy=INSTALL_REMEDY,
        )


def _check_script(stage: str, language: str) -> None:
    """Raises PrepareError: for this code datatrove has the rules of another script than the one its table marks.

    datatrove 0.10.1 takes the table's text FALSE for true, so that of several scripts the last one counts: `zho` is cut
    at spaces, as Chinese in Latin letters, and `arb` and `hin` by the rules of Maltese and Kurdish.
    """
    from datatrove.utils.word_tokenizers import load_tokenizer_assignments

    rules = load_tokenizer_assignments()
    table = (files("datatrove") / "assets/tokenizer_assignment.csv").read_text("utf-8")
    for row in csv.DictReader(table.splitlines()):
        by_two_letters = row["code_1"] == language and row["default_code_1"] == "TRUE"
        if row["default_script"] != "TRUE" or not (row["code_3"] == language or by_two_letters):
            continue
        marked = f"{language}_{row['script']}"
        if marked in rules and rules[marked].args != rules[language].args:
            raise PrepareError(
                f"stage {stage}: for the language {language} datatrove {version('datatrove')} takes the rules of "
                f"another script than {row['script']}",
                remedy=f"write language: {marked}",
            )


def _make_filter(stage: DatatroveFilter) -> Callable[[Document], Document | DropDecision]:
    from datatrove.pipeline import filters

    if isinstance(stage, UrlFilter):
        return partial(_decide_by_url, _url_filter(stage))
    theirs = getattr(filters, f"{type(stage).__name__}Filter")  # our classes have the names of theirs
    block = theirs(**stage.model_dump(exclude={"stage"}, exclude_none=True))
    check = FILTER_BY_NAME[stage.stage](block, get_splitter(stage.language))

    def filter_document(document: Document) -> Document | DropDecision:
        text = document.text
        if not any(map(str.isalnum, text)):
            return DropDecision("no_words")  # filters divide by the number of words
        if isinstance(stage, C4Quality) and (reason := _page_drop_reason(stage, text)):
            return DropDecision(reason)
        reason, left = check(text)
        if reason:
            return DropDecision(reason)
        if not left.strip():
            return DropDecision("empty")
        return document if left == text else replace(document, text=left)

    return filter_document


def _decide_by_url(block: Any, document: Document) -> Document | DropDecision:
    from datatrove.data import Document as Theirs

    if document.url is None:
        return document
    found = block.filter(Theirs(text=document.text, id=document.id, metadata={"url": document.url}))
    kept, reason = found if isinstance(found, tuple) else (found, "")
    return document if kept else DropDecision(reason or "dropped")


def _page_drop_reason(stage: C4Quality, text: str) -> str:
    if stage.filter_lorem_ipsum and "lorem ipsum" in text.lower():
        return "lorem_ipsum"
    return "curly_bracket" if stage.filter_curly_bracket and "{" in text else ""


def _url_filter(stage: UrlFilter) -> Any:
    from datatrove.pipeline.filters import URLFilter
    from tldextract import TLDExtract

    block = URLFilter(
        soft_word_threshold=stage.soft_word_threshold,
        extra_domains=stage.domains,
        extra_urls=stage.urls,
        banned_words=stage.banned_words,
        banned_subwords=stage.banned_subwords,
        soft_banned_words=stage.soft_banned_words,
        use_integrated_lists=stage.integrated_lists,
    )
    # datatrove's extractor would fetch the current list of public suffixes: results would depend on day and network.
    block.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)
    return block
