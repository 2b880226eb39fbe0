"""Shares of sources by language, by temperature, and of translations beside text, against a plain statement."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.samples.spec import SourceSpec
from data_service.stream.mixture import fill_weights, source_weights

LANGUAGES = [(), ("en",), ("fr",), ("de",), ("en", "fr"), ("en", "de")]
sized = st.lists(st.tuples(st.sampled_from(LANGUAGES), st.integers(1, 10**9)), min_size=1, max_size=8)


def sources_of(sizes: list[tuple[tuple[str, ...], int]]) -> list[SourceSpec]:
    return [
        SourceSpec(name=f"s{number}", uri="", manifest_fingerprint="", languages=languages)
        for number, (languages, _) in enumerate(sizes)
    ]


def stated(sizes: list[tuple[tuple[str, ...], int]], alpha: float, share: float | None) -> list[float]:
    """Of each source: its language is drawn by p^alpha, on its side of the share; then it, by size."""
    found = []
    for languages, size in sizes:
        both = [other for other in sizes if (len(other[0]) == 2) == (len(languages) == 2)] if share else sizes
        groups: dict[object, int] = {}
        for number, (other, other_size) in enumerate(both):
            key = other or number
            groups[key] = groups.get(key, 0) + other_size
        alike = sum(s for other, s in sizes if other == languages) if languages else size
        part = alike**alpha / math.fsum(total**alpha for total in groups.values()) * size / alike
        if share and len(both) < len(sizes):
            part *= share if len(languages) == 2 else 1 - share
        found.append(part)
    return found


@given(sized, st.sampled_from([1.0, 1.428571, 2.0, 5.0]), st.sampled_from([None, 0.5, 0.1]))
def test_languages_are_drawn_by_temperature_on_each_side_of_the_share(
    sizes: list[tuple[tuple[str, ...], int]], temperature: float, share: float | None
) -> None:
    weights = source_weights(sources_of(sizes), [size for _, size in sizes], temperature, share)
    if temperature == 1 and share is None:
        assert weights is None
        return
    assert weights is not None
    total = math.fsum(weights)
    expected = stated(sizes, 1 / temperature, share)
    assert [weight / total for weight in weights] == pytest.approx(expected, rel=1e-9)


@given(sized, st.sampled_from([1.0, 1.428571, 5.0]), st.data())
def test_sources_without_a_weight_share_out_what_the_others_leave(
    sizes: list[tuple[tuple[str, ...], int]], temperature: float, data: st.DataObject
) -> None:
    """A source that is not read (0) does not count towards its language."""
    part = st.sampled_from([None, 0.0, 0.9 / len(sizes)])
    given = data.draw(st.lists(part, min_size=len(sizes), max_size=len(sizes)).filter(lambda it: None in it))
    filled = fill_weights(given, sources_of(sizes), [size for _, size in sizes], temperature)
    assert math.fsum(filled) == pytest.approx(1)
    left = 1 - math.fsum(weight for weight in given if weight is not None)
    drawn = stated([one for one, weight in zip(sizes, given, strict=True) if weight is None], 1 / temperature, None)
    expected = iter([left * weight for weight in drawn])
    assert filled == pytest.approx([next(expected) if weight is None else weight for weight in given])


def test_a_source_that_is_alone_keeps_the_weight_that_it_had() -> None:
    sizes = [((), 7), (("en",), 1000), (("fr",), 31)]
    plain = source_weights(sources_of([((), size) for _, size in sizes]), [7, 1000, 31], 1.5)
    assert source_weights(sources_of(sizes), [7, 1000, 31], 1.5) == plain
