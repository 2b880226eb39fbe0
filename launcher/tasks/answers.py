"""Exact match and F1 of answers: SQuAD's (Rajpurkar et al. 2016, 2018), over words, and CMRC 2018's, over characters.

A question's score is that of the accepted answer which is most like the prediction. Without an accepted answer only ""
is right.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from launcher.tasks.examples import Questions
from launcher.tasks.schema import Metric

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def score_answers(
    metrics: Sequence[Metric], examples: Questions, predictions: Mapping[str, str]
) -> dict[str, float]:
    """Means over all questions, in [0, 1]. `predictions`: of each id the answer, "" for none.

    exact_match and answer_f1 are SQuAD's, cmrc_exact_match and cmrc_f1 CMRC's.
    """
    scores: dict[str, float] = {}
    for metric in metrics:
        exact, chinese = metric.endswith("exact_match"), metric.startswith("cmrc")
        total = 0.0
        for name, accepted in zip(examples.ids, examples.answers, strict=True):
            texts = [answer.text for answer in accepted] or [""]
            total += max(_similarity(text, predictions[name], exact=exact, chinese=chinese) for text in texts)
        scores[metric] = total / len(examples)
    return scores


def _similarity(accepted: str, predicted: str, *, exact: bool, chinese: bool) -> float:
    if chinese:
        right, given = pieces_of_chinese(accepted), pieces_of_chinese(predicted)
        if exact:
            return float("".join(right) == "".join(given))
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
    """Chinese characters one by one, other words whole, punctuation and white space away, as CMRC compares them."""
    pieces: list[str] = []
    word = ""
    for character in answer.lower():
        if _is_chinese(character) or character.isspace() or _is_mark(character):
            pieces += [word] if word else []
            word = ""
            pieces += [character] if _is_chinese(character) else []
        else:
            word += character
    return [*pieces, word] if word else pieces


def _is_chinese(character: str) -> bool:
    return "\u4e00" <= character <= "\u9fff"


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


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
