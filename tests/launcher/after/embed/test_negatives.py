"""Hard negatives: the nearest texts of other queries, by their definition written out, and the same every time."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from data_service.corpus.corpus import open_corpus
from data_service.errors import InputError
from data_service.ingest.build import build_corpus
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions, PairFields
from data_service.store.base import Store
from data_service.tokenizers.load import save_tokenizer
from launcher.after.embed.model import load_model
from launcher.after.embed.negatives import PairExample, mine_negatives, read_pair_examples, write_pair_examples
from launcher.after.embed.settings import EncodingSettings, MiningSettings
from launcher.errors import TaskError
from tests.support.checks.command import exit_code
from tests.support.data.made_up import WORDS
from tests.support.models.exports import fitting_tokenizer
from tests.support.tasks.small_tasks import Models


@pytest.fixture(scope="module")
def model(models: Models) -> SentenceTransformer:
    return load_model(models("bert"), EncodingSettings(pooling="cls"))


def pairs(seed: int, count: int = 24) -> list[PairExample]:
    """Some queries twice, with another positive; some positives of two queries; one that is its own query's text."""
    draw = random.Random(seed)
    found = [PairExample(" ".join(draw.choices(WORDS, k=4)), " ".join(draw.choices(WORDS, k=8))) for _ in range(count)]
    found += [PairExample(found[0].query, found[5].positive), PairExample(found[1].query, "another one")]
    return [
        *found,
        PairExample("the answer to itself", found[2].positive),
        PairExample("why", "the answer to itself"),
    ]


def literal(model: SentenceTransformer, examples: list[PairExample], count: int, share: float) -> list[list[str]]:
    """Pair by pair, over all texts by their cosine."""
    texts = list(dict.fromkeys(example.positive for example in examples))
    vector = {
        text: model.encode(text, show_progress_bar=False) / np.linalg.norm(model.encode(text))
        for text in {*texts, *(example.query for example in examples)}
    }
    found = []
    for example in examples:
        own = {other.positive for other in examples if other.query == example.query} | {example.query}
        cosine = {text: float(vector[example.query] @ vector[text]) for text in texts}
        its = min(cosine[other.positive] for other in examples if other.query == example.query)
        bound = its * share if its >= 0 else its * (2 - share)
        possible = [text for text in texts if text not in own and cosine[text] < bound]
        found.append(sorted(possible, key=lambda text: -cosine[text])[:count])
    return found


@pytest.mark.long
@pytest.mark.parametrize(("seed", "count", "share"), [(0, 1, 1.0), (1, 3, 0.999), (2, 2, 1.0)])
def test_negatives_are_the_nearest_texts_of_others(
    model: SentenceTransformer, seed: int, count: int, share: float
) -> None:
    examples = pairs(seed)
    expected = literal(model, examples, count, share)
    found = mine_negatives(model, examples, MiningSettings(negatives=count, share=share, batch=5))
    whole = [
        PairExample(one.query, one.positive, tuple(texts))
        for one, texts in zip(examples, expected, strict=True)
        if len(texts) == count
    ]
    assert len(whole) > 8
    assert len(whole) < len(examples) or share == 1.0  # some have too few
    assert sorted(found, key=str) == sorted(whole, key=str)


def test_if_no_pair_has_enough_it_is_said(model: SentenceTransformer) -> None:
    with pytest.raises(TaskError, match=r"\b20\b.*\b1\b"):
        mine_negatives(model, [PairExample("one", "two")], MiningSettings(negatives=20))
    with pytest.raises(TaskError, match=r"\b2\b"):
        mine_negatives(model, pairs(0)[:2], MiningSettings(negatives=2, share=1.0))


@pytest.mark.long
def test_pairs_are_read_as_corpora_of_pairs_are_and_written_once(tmp_path: Path, any_store: Store) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "x", "a": "y", "negatives": ["old"]}\n{"q": "z", "a": " "}\n')
    (tmp_path / "b.csv").write_text("q,a\nu,v\n")
    options = BuildOptions(pairs=PairFields(query="q", positive="a"))
    found = read_pair_examples(list_inputs([str(tmp_path)]), options)
    assert [(one.query, one.positive) for one in found] == [("x", "y"), ("u", "v")]
    (tmp_path / "c.jsonl").write_text('{"q": "x"}\n')
    with pytest.raises(InputError, match=r"\ba\b"):
        read_pair_examples(list_inputs([str(tmp_path / "c.jsonl")]), options)
    out = f"{any_store.uri}/mined.jsonl"
    write_pair_examples([PairExample("ü", "y", ("n", "m"))], out)
    assert json.loads(any_store.get("mined.jsonl")) == {
        "query": "ü",
        "positive": "y",
        "negatives": ["n", "m"],
    }
    with pytest.raises(TaskError, match=r"mined\.jsonl"):
        write_pair_examples([], out)


@pytest.mark.long
def test_a_command_from_pairs_to_the_next_phases_corpus(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the same bytes, and a corpus that has them."""
    lines = [json.dumps({"query": one.query, "positive": one.positive}) for one in pairs(3)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    written = []
    for name in ("one.jsonl", "two.jsonl"):
        words = [
            "embed",
            "negatives",
            str(models("bert").folder),
            str(tmp_path / "pairs.jsonl"),
            "--pooling",
            "cls",
        ]
        options = ["--negatives", "2", "--share", "1", "--out", str(tmp_path / name)]
        assert exit_code(*words, *options) == 0, capsys.readouterr().err
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    records = [json.loads(line) for line in written[0].splitlines()]
    assert len(lines) >= len(records) > 8
    assert all(len(record["negatives"]) == 2 for record in records)
    save_tokenizer(fitting_tokenizer("wordpiece", "bert"), f"{tmp_path}/tokenizer")
    build_corpus(
        [str(tmp_path / "one.jsonl")],
        f"{tmp_path}/corpus",
        f"{tmp_path}/tokenizer",
        BuildOptions(pairs=PairFields(count=2), heldout_fraction=0.0),
        lambda progress: None,
    )
    pairs_of = open_corpus(f"{tmp_path}/corpus").manifest.pairs
    assert pairs_of is not None
    assert pairs_of.negatives == 2
