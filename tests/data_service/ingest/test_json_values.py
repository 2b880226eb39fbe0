"""JSON of records with integers that Python does not convert: they stand for no other value and cost no document."""

import json
import random
import sys
from pathlib import Path

import pytest

from data_service.corpus.provenance import ProvenanceOptions
from data_service.errors import InputError
from data_service.ingest.json_values import LongInteger, parse_json_value
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord, TextRecord
from tests.data_service.ingest.test_mds import shard
from tests.support.data.text_files import records_of, tar_of

MOST_DIGITS = sys.get_int_max_str_digits()
OPTIONS = BuildOptions(on_bad_records="skip", provenance=ProvenanceOptions(id="id", may_lack=("id",)))


def random_json(drawn: random.Random, depth: int = 0) -> tuple[str, object]:
    """Return a value as JSON and as it is to be parsed."""
    kind = drawn.randrange(6 if depth < 4 else 4)
    if kind < 2:
        count = drawn.choice([1, 5, MOST_DIGITS, MOST_DIGITS + 1, MOST_DIGITS + drawn.randrange(2, 900)])
        digits, sign = drawn.choice("123456789") * count, drawn.choice(["", "-"])
        return sign + digits, int(sign + digits) if count <= MOST_DIGITS else LongInteger()
    if kind < 4:
        value = drawn.choice(["", "text", "9" * 5_000, 1.5, None, True])
        return json.dumps(value), value
    parts = [random_json(drawn, depth + 1) for _ in range(drawn.randrange(4))]
    if kind == 4:
        return f"[{', '.join(text for text, _ in parts)}]", [value for _, value in parts]
    named = ", ".join(f'"{number}": {text}' for number, (text, _) in enumerate(parts))
    return f"{{{named}}}", {str(number): value for number, (_, value) in enumerate(parts)}


def test_long_integers_alone_are_replaced() -> None:
    drawn = random.Random(3)
    for _ in range(200):
        text, value = random_json(drawn)
        assert parse_json_value(text) == value
        assert parse_json_value(text.encode()) == value
        with pytest.raises(json.JSONDecodeError):
            parse_json_value(f"[{text}, 1, ]")


@pytest.mark.parametrize("suffix", [".jsonl", ".tar", ".mds"])
def test_one_as_an_id_makes_a_bad_record_and_elsewhere_none(tmp_path: Path, suffix: str) -> None:
    drawn, path = random.Random(5), tmp_path / f"a{suffix}"
    ids = [drawn.choice(["7", '"x"', "null", "8" * (MOST_DIGITS + 1)]) for _ in range(30)]
    records = [f'{{"n": [{"9" * 5_000}],\n"id": {found}, "text": "text {i}"}}' for i, found in enumerate(ids)]
    if suffix == ".jsonl":
        path.write_text("\n".join(record.replace("\n", " ") for record in records))
    elif suffix == ".tar":
        path.write_bytes(tar_of({f"{i}.json": record.encode() for i, record in enumerate(records)}))
    else:
        samples = [{"text": f"text {i}", "id": found.encode(), "n": b"9" * 5_000} for i, found in enumerate(ids)]
        path.write_bytes(shard({"text": "str", "id": "json", "n": "json"}, samples))
    bad = [len(found) > MOST_DIGITS for found in ids]
    made = records_of(path, OPTIONS)
    assert [isinstance(record, BadRecord) for record in made] == bad
    known = {"7": "7", '"x"': "x", "null": None}
    texts = [(f"text {i}", known[found]) for i, found in enumerate(ids) if found in known]
    good = [record for record in made if isinstance(record, TextRecord)]
    assert [(record.text, record.provenance and record.provenance.id) for record in good] == texts
    with pytest.raises(InputError) as failure:
        records_of(path, OPTIONS.model_copy(update={"on_bad_records": "error"}))
    assert str(path) in failure.value.problem
