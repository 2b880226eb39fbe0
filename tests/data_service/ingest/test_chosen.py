"""A build keeps only the licences and sources that `only` chooses, and counts the others."""

import random
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from data_service.corpus.corpus import SPLITS, open_corpus
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.sidecar import read_origins
from data_service.errors import InputError
from tests.support.data import raw_text
from tests.support.data.raw_text import SMALL, build
from tests.support.data.text_files import write_lines

DOCUMENTS = raw_text.DOCUMENTS[:40]
Record = dict[str, object]


def matches(value: str | None, pattern: str) -> bool:
    """A pattern with stars, by the shell's rule for these alone."""
    return value is not None and fnmatchcase(value.lower(), pattern.lower().replace("[", "[[]"))


@pytest.mark.parametrize("seed", range(3))
def test_only_chosen_licences_and_sources_are_kept(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    licences = ("MIT", "CC-BY-4.0", "cc-by-sa 3", "CC0", "own [1]\nline", None)
    made: list[Record] = [
        {"docid": f"d{n}", "text": text, "license": draw.choice(licences), "from": draw.choice("abc")}
        for n, text in enumerate(DOCUMENTS)
    ]
    write_lines(tmp_path / "in" / "a.jsonl", made)
    patterns = {
        "licence": [*draw.sample(["mit", "cc-by*", "*0", "own [1]*", "nothing"], 2), "CC-BY-4.0"],
        "source": draw.sample(["a", "B", "c*"], 2),
    }
    chosen = ProvenanceOptions.model_validate(
        {"id": "docid", "licence": "license", "source": "from", "may_lack": ["licence"], "only": patterns}
    )
    expected = {
        record["docid"]
        for record in made
        if any(matches(record["license"], one) for one in patterns["licence"])  # type: ignore[arg-type]
        and any(matches(str(record["from"]), one) for one in patterns["source"])
    }
    manifest = build(tmp_path / "in", tmp_path / "corpus", SMALL.model_copy(update={"provenance": chosen}))
    corpus = open_corpus(str(tmp_path / "corpus"))
    kept = {
        row.provenance.id
        for split in SPLITS
        for shard in corpus.table(split).shards
        for row in read_origins(corpus, split, shard)
    }
    assert kept == expected
    assert manifest.counts["not_chosen"] == len(made) - len(expected)
    assert manifest.counts["documents_read"] == len(made)


def test_a_choice_that_leaves_nothing_is_said(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": text, "license": "MIT"} for text in DOCUMENTS])
    none = ProvenanceOptions.model_validate({"licence": "license", "only": {"licence": ["gpl"]}})
    with pytest.raises(InputError, match=f"{len(DOCUMENTS)} that `only`"):
        build(tmp_path / "in", tmp_path / "corpus", SMALL.model_copy(update={"provenance": none}))
    with pytest.raises(ValueError, match="source"):
        ProvenanceOptions.model_validate({"licence": "license", "only": {"source": ["web"]}})
