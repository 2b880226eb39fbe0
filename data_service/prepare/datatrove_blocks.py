"""datatrove's filters, called as functions of one document. Nothing else of datatrove is used.

datatrove's pipeline blocks may download files, or keep state between documents. Here a block is created so that it does
neither, and is tried on a sample text before any work starts, which reveals missing packages and rules. For quality
filters the block holds only the settings; `quality.py` makes the same decisions faster.
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
_TRIAL_TEXT = "The bank of the river is where they met, and that is what it has to be. " * 8  # sample for each filter


class GopherQuality(StrictRecord):
    """Gopher's rules for the quality of a text: number and length of words, symbols, bullets, ellipses, stop words.

    `language`: datatrove's three-letter code of the language whose rules split words. Defaults are Gopher's.
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
    """Gopher's rules against repeated lines, paragraphs and n-grams within a document. Limits: shares of its lines or
    paragraphs (`_frac`), or of its characters (`_char_frac`)."""

    stage: Literal["gopher_repetition"]
    language: str = "eng"
    dup_line_frac: float = 0.3
    dup_para_frac: float = 0.3
    dup_line_char_frac: float = 0.2
    dup_para_char_frac: float = 0.2


class C4Quality(StrictRecord):
    """C4's rules: drop short lines, lines without final punctuation, and documents with too few sentences.

    Documents with a curly bracket or "lorem ipsum" anywhere are dropped, as in the paper (arXiv 1910.10683, section
    2.2). C4's own code and datatrove look for both only in lines that passed the other rules.
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
    """FineWeb's own rules: lines without final punctuation, short lines, repeated lines, lists."""

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
        integrated_lists: whether datatrove's own lists are used, too.
        domains, urls, banned_words, banned_subwords, soft_banned_words: further entries of these lists.
        soft_word_threshold: number of soft banned words from which a URL is dropped.
    """

    stage: Literal["url_filter"]
    integrated_lists: bool = True
    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    banned_words: tuple[str, ...] = ()
    banned_subwords: tuple[str, ...] = ()
    soft_banned_words: tuple[str, ...] = ()
    soft_word_threshold: int = Field(default=2, ge=1)


DatatroveFilter = GopherQuality | GopherRepetition | C4Quality | FineWebQuality | UrlFilter  # settings of a stage


def make_datatrove_filter(stage: DatatroveFilter) -> Callable[[Document], Document | DropDecision]:
    """Return the function that applies the stage to a document.

    Raises:
        PrepareError: a package is missing, or datatrove has no rules for the language, or only for another script.
        LibraryChanged: the installed version of datatrove was not tested.
    """
    _check_version(stage.stage)
    try:
        from loguru import logger

        logger.disable("datatrove")  # datatrove would log its unpacking of lists on standard error
        if not isinstance(stage, UrlFilter):
            _check_script(stage.stage, stage.language)
        decide = _make_filter(stage)
        decide(Document("trial", _TRIAL_TEXT, "trial", url="https://example.org/page"))
    except (ImportError, LookupError, OSError, ValueError) as error:
        message = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise PrepareError(
            f"stage {stage.stage} cannot start: {message}",
            remedy=f"{INSTALL_REMEDY}, and any other package that the message names; if the message is about the "
            "language, set `language` to one that datatrove has rules for, such as eng",
        ) from error
    return decide


def _check_version(stage: str) -> None:
    try:
        found = version("datatrove")
    except PackageNotFoundError as error:
        raise PrepareError(f"stage {stage} needs datatrove, which is not installed", remedy=INSTALL_REMEDY) from error
    if found not in _TESTED_VERSIONS:
        raise LibraryChanged(
            f"stage {stage} needs datatrove {_TESTED_VERSIONS}, but {found} is installed",
            remedy=INSTALL_REMEDY,
        )


def _check_script(stage: str, language: str) -> None:
    """Raise PrepareError if datatrove would split words by the rules for a script that is not the language's default.

    datatrove 0.10.1 reads the text FALSE in its table as true, so the last of several scripts wins: `zho` is split at
    spaces, like Chinese in Latin letters, and `arb` and `hin` by the rules of Maltese and Kurdish.
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
                f"stage {stage}: for the language {language} datatrove {version('datatrove')} uses the rules of "
                f"another script instead of {row['script']}",
                remedy=f"write `language: {marked}`",
            )


def _make_filter(stage: DatatroveFilter) -> Callable[[Document], Document | DropDecision]:
    """Return the function that applies the stage to a document, not yet tried."""
    from datatrove.pipeline import filters

    if isinstance(stage, UrlFilter):
        return partial(_decide_by_url, _url_filter(stage))
    filter_class = getattr(filters, f"{type(stage).__name__}Filter")  # GopherQuality has GopherQualityFilter
    block = filter_class(**stage.model_dump(exclude={"stage"}, exclude_none=True))
    check = FILTER_BY_NAME[stage.stage](block, get_splitter(stage.language))

    def filter_document(document: Document) -> Document | DropDecision:
        text = document.text
        if not any(map(str.isalnum, text)):
            return DropDecision("no_words")  # the filters would divide by zero words
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
    """Return the reason to drop a text because of a word or character anywhere in it; "" to keep it."""
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
    # datatrove's extractor would download the current list of public suffixes, so that results would change over time.
    block.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)
    return block
