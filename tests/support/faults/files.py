"""Texts, files and records changed at random, as disks, editors and mistakes change them."""

from typing import Any

from hypothesis import strategies as st

_HOSTILE = (
    *(
        b'"',
        b"'",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\r",
        b"\n",
        b"\n\n",
        b"\t",
        b",",
        b" ",
        b":",
        b": ",
        b"- ",
    ),
    *(b"{", b"}", b"[", b"]", b"[" * 3000, b"null", b"true", b"-1", b"NaN", b"1e999", b"0.5", b"9" * 5000),
    *(
        b"\\ud800",
        b"\\u0000",
        b"&a [*a]",
        b"!!python/object/apply:os.getcwd []",
        b"<<: ",
        b"\x1f\x8b\x08",
        b"PAR1",
    ),
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.none(), st.integers(-2, 9), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with up to three stretches cut, doubled, overwritten or put in."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = min(len(raw), start + draw(st.one_of(st.integers(0, 9), st.integers(0, len(raw)))))
        match draw(st.sampled_from(("cut", "double", "overwrite", "put in"))):
            case "cut":
                del raw[start:stop]
            case "double":
                raw[stop:stop] = raw[start:stop]
            case "overwrite":
                raw[start : min(stop, start + 4)] = draw(st.binary(max_size=4))
            case _:
                raw[start:start] = draw(st.sampled_from(_HOSTILE))
    return bytes(raw)


@st.composite
def altered(draw: st.DrawFn, record: Any) -> Any:
    """A copy of `record`, of JSON's types, in which one value is another one, or gone."""
    if not isinstance(record, dict | list) or not record or draw(st.integers(0, 3)) == 0:
        return draw(VALUES)
    copy = record.copy()
    places = list(copy) if isinstance(copy, dict) else range(len(copy))
    place = draw(st.sampled_from(places))
    if draw(st.integers(0, 4)) == 0:
        del copy[place]
    else:
        copy[place] = draw(altered(copy[place]))
    return copy
