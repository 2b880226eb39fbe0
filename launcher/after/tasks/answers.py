"""Exact match and F1 of answers: SQuAD's (Rajpurkar et al. 2016, 2018), over words, and CMRC 2018's, over characters.

A question's score is that of the accepted answer which is most like the prediction. Without an accepted answer only ""
is right. SQuAD 2.0's script, unlike 1.1's, takes no accepted answer of which nothing is left ("the").
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from launcher.after.tasks.examples import Questions
from launcher.after.tasks.schema import Metric

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
_CMRC_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")  # noqa: RUF001 - the official script's
_CHINESE = re.compile(r"([\u4e00-\u9fa5])")
_WORDS = re.compile(r"\d+(?:[.,]\d+)*|\w+|[^\w\s]")


def score_answers(
    metrics: Sequence[Metric], examples: Questions, predictions: Mapping[str, str], *, no_answer: bool
) -> dict[str, float]:
    """Means over all questions, in [0, 1]. `predictions`: of each id the answer, "" for none. `no_answer`: questions
    may have none, as in SQuAD 2.0.

    exact_match and answer_f1 are SQuAD's, cmrc_exact_match and cmrc_f1 CMRC's.
    """
    scores: dict[str, float] = {}
    for metric in metrics:
        exact, chinese = metric.endswith("exact_match"), metric.startswith("cmrc")
        total = 0.0
        for name, accepted in zip(examples.ids, examples.answers, strict=True):
            texts = [answer.text for answer in accepted]
            if no_answer and not chinese:
                texts = [text for text in texts if words_of(text)]
            total += max(
                _similarity(text, predictions[name], exact=exact, chinese=chinese) for text in texts or [""]
            )
        scores[metric] = total / len(examples)
    return scores


def _similarity(accepted: str, predicted: str, *, exact: bool, chinese: bool) -> float:
    if chinese and exact:
        return float(plain_chinese(accepted) == plain_chinese(predicted))
    if chinese:
        right, given = pieces_of_chinese(accepted), pieces_of_chinese(predicted)
        return _overlap(longest_common(right, given), len(right), len(given))
    right, given = words_of(accepted), words_of(predicted)
    if exact:
        return float(right == given)
    return _overlap(sum((Counter(right) & Counter(given)).values()), len(right), len(given))


def _overlap(common: int, right: int, given: int) -> float:
    """Harmonic mean of precision and recall; of nothing with nothing 1."""
    return 2 * common / (right + given) if right and given else float(right == given)


def words_of(answer: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and without articles, as SQuAD compares them."""
    plain = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split()


def pieces_of_chinese(answer: str) -> list[str]:
    """Chinese characters one by one and other words whole, without punctuation, as CMRC compares them for F1.

    The official script takes words apart with NLTK; here a number, a run of letters and any other sign are words.
    """
    pieces: list[str] = []
    for stretch in _CHINESE.split(plain_chinese(answer)):
        pieces += [stretch] if _CHINESE.fullmatch(stretch) else _WORDS.findall(stretch)
    return pieces


def plain_chinese(answer: str) -> str:
    """In lower case and without punctuation, as CMRC compares answers for exact match."""
    return "".join(character for character in answer.lower().strip() if character not in _CMRC_PUNCTUATION)


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest run of pieces that both have."""
    longest = 0
    before = [0] * (len(second) + 1)
    for piece in first:
        ending = [0]
        for index, other in enumerate(second):
            ending.append(before[index] + 1 if piece == other else 0)
        longest, before = max(longest, *ending), ending
    return longest
