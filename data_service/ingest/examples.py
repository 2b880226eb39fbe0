"""Examples of a corpus of pairs: the fields of a record that are its texts, query first."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from data_service.ingest.options import BuildOptions, PairFields
from data_service.ingest.text import BadRecord, Place, Text, checked, decode

_FIELDS = "name the fields with --query-field, --positive-field and --negatives-field"


def example(record: Mapping[str, object], pairs: PairFields, options: BuildOptions, place: Place) -> Text:
    """Query, positive and the first `pairs.count` negatives of a record, whose values are text, bytes, lists of these,
    or None, as where a field is missing.

    Negatives come from all fields named for them, in order; blank ones are none.

    Raises:
        BadRecord: not one query and one positive, too few negatives, values that are no text, or too much of it.
    """
    query, positive = (_one(record, name, options, place) for name in (pairs.query, pairs.positive))
    names = pairs.negatives if pairs.count else ()
    negatives = [
        text for name in names for text in _texts(record.get(name), name, options, place) if not text.blank
    ]
    if len(negatives) < pairs.count:
        raise BadRecord(
            place,
            f"{len(negatives)} negatives in {' and '.join(map(repr, names))}, and each example has {pairs.count}",
            f"ask for fewer with --negatives, give more, or {_FIELDS}",
        )
    found = (query, positive, *negatives[: pairs.count])
    made = replace(
        query, others=tuple(text.text for text in found[1:]), replaced=any(text.replaced for text in found)
    )
    if made.size > options.max_document_bytes:
        raise BadRecord(
            place,
            f"an example of more than {options.max_document_bytes:,} bytes",
            "shorten its texts, whose ends training cuts off anyway, or raise --max-document-bytes",
        )
    return made


def _one(record: Mapping[str, object], name: str, options: BuildOptions, place: Place) -> Text:
    if record.get(name) is None:
        there = "it is null" if name in record else f"it has {', '.join(map(repr, record))}"
        raise BadRecord(place, f"no field {name!r} ({there})", _FIELDS)
    found = list(_texts(record[name], name, options, place))
    if len(found) != 1:
        raise BadRecord(
            place,
            f"field {name!r} holds {len(found)} texts, and an example has one",
            "write a record for each of them",
        )
    return found[0]


def _texts(value: object, name: str, options: BuildOptions, place: Place) -> Iterator[Text]:
    """The texts in a field's value; none in None."""
    match value:
        case None:
            return
        case str():
            yield checked(value, options, place)
        case bytes():
            raw = decode(value, options, place)
            yield replace(checked(raw.text, options, place), replaced=raw.replaced)
        case list():
            for item in value:
                yield from _texts(item, name, options, place)
        case _:
            raise BadRecord(place, f"field {name!r} holds {type(value).__name__}, not text", _FIELDS)
