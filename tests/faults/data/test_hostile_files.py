"""Files from elsewhere that are made to harm: tokenizers, weights, heads. An error of ours with the file's place, in
little time and memory; never a traceback, and nothing of theirs is run."""

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.hf.folder import WEIGHTS
from checkpoints.hf.headers import check_weights
from checkpoints.hf.load import read_folder_config
from data_service.errors import TokenizerError
from data_service.errors import UserError as DataError
from data_service.store.open import open_store
from data_service.tokenizers.load import from_files
from data_service.tokenizers.train import train_tokenizer
from encoder_core.errors import UserError as CoreError
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.runtime.recipe.load import load
from launcher.runtime.run.text_vectors import keep_modules
from tests.support.data.made_up import WORDS
from tests.support.faults.files import altered, damaged
from tests.support.models.exports import FAMILIES, export
from tests.support.runs.small_runs import SMALL

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
TEXTS = [" ".join(WORDS[place : place + 9]) for place in range(0, len(WORDS), 3)]
MOST_S, MOST_BYTES = 20.0, 2 << 30
Change = Callable[[dict[str, Any]], object]


@contextmanager
def bounded() -> Iterator[None]:
    """At most so much time, and so much memory more than there is."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, began = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - began < MOST_S


def refused(work: Callable[[], object]) -> str:
    """What is said where it is refused; nothing where it is done."""
    with bounded():
        try:
            work()
        except (DataError, CoreError) as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, bytes]]:
    """Files of tokenizers, by kind."""
    sizes = {"byte_bpe": 300, "wordpiece": 120, "unigram": 330}
    return {
        kind: train_tokenizer(kind, TEXTS, size, allow_fewer_ids=True).save_files()  # type: ignore[arg-type]
        for kind, size in sizes.items()
    }


def use(files: dict[str, bytes]) -> None:
    """Whatever is asked of a tokenizer."""
    tokenizer = from_files(files, where="folder/of/it")
    tokenizer.encode_batch([*TEXTS[:3], "a" * 60 + "b", "猫 \U0001f431", ""])
    tokenizer.encode_placed(TEXTS[:2])
    assert len(tokenizer.special_mask) == len(tokenizer.word_starts) == tokenizer.vocab_size
    tokenizer.save_files()


def put(*path: str, value: object) -> Change:
    def change(definition: dict[str, Any]) -> None:
        place = definition
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


def _split(pattern: str) -> object:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _nested(depth: int) -> object:
    rule: object = {"type": "Lowercase"}
    for _ in range(depth):
        rule = {"type": "Sequence", "normalizers": [rule]}
    return rule


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}
BOMBS: dict[str, Change] = {
    "an id beyond memory": put("model", "vocab", "zzz", value=(1 << 32) - 1),
    "an id that fills memory": put("model", "vocab", "zzz", value=300_000_000),
    "an added token's id": lambda made: made["added_tokens"].append(
        {**made["added_tokens"][0], "id": (1 << 32) - 1, "content": "zzz"}
    ),
    "a text 8,000,000,000 times as long": put("normalizer", value={"type": "Sequence", "normalizers": [LONGER] * 3}),
    "words of any length": put("model", "max_input_chars_per_word", value=1 << 60),
    "a rule that goes back for ever": put("pre_tokenizer", value=_split("(a+)+$")),
    "another": put("pre_tokenizer", value=_split("(a|aa)+$")),
    "a rule of 50,000 brackets": put("pre_tokenizer", value=_split("(" * 50_000)),
    "rules in rules": put("normalizer", value=_nested(90)),
    "a map of characters that is none": put(
        "normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "no such model": put("model", "type", value="Pickle"),
    "no piece for what is unknown": put("model", "unk_token", value="nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_that_was_made_to_harm(real: dict[str, dict[str, bytes]], bomb: str) -> None:
    definition = json.loads(real["wordpiece"]["tokenizer.json"])
    BOMBS[bomb](definition)
    with bounded(), pytest.raises(TokenizerError, match="folder/of/it"):
        use(real["wordpiece"] | {"tokenizer.json": json.dumps(definition).encode()})


JSONS = [b"[" * 200_000, b'{"a":' * 200_000, b'{"model": %s}' % (b"9" * 6000), b"\xff\xfe{"]


@pytest.mark.parametrize("content", JSONS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_json_that_was_made_to_harm(real: dict[str, dict[str, bytes]], name: str, content: bytes) -> None:
    with (
        bounded(),
        pytest.raises(TokenizerError, match=f"folder/of/it: {name}" if name != "tokenizer.json" else ""),
    ):
        use(real["byte_bpe"] | {name: content})


def any_tokenizer(real: dict[str, dict[str, bytes]], data: st.DataObject) -> None:
    files = real[data.draw(st.sampled_from(sorted(real)))]
    name = data.draw(st.sampled_from(["tokenizer.json"] * 3 + ["tokenizer_config.json", "special_tokens_map.json"]))
    content = files[name]
    if data.draw(st.booleans()):
        content = json.dumps(data.draw(altered(json.loads(content)))).encode()
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
    with bounded(), suppress(DataError):
        use(files | {name: content})


@settings(ANY, max_examples=12)
@given(data=st.data())
def test_a_tokenizer_changed_at_random(real: dict[str, dict[str, bytes]], data: st.DataObject) -> None:
    any_tokenizer(real, data)


@pytest.mark.long
@settings(ANY, max_examples=6000)
@given(data=st.data())
def test_any_tokenizer(real: dict[str, dict[str, bytes]], data: st.DataObject) -> None:
    any_tokenizer(real, data)


def places(content: object) -> Iterator[tuple[str, ...]]:
    """Where the keys of nested objects are, but for a vocabulary's."""
    if isinstance(content, dict):
        for key, inner in content.items():
            yield (key,)
            if key != "vocab":
                yield from ((key, *place) for place in places(inner))


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram"])
def test_any_key_may_be_missing(real: dict[str, dict[str, bytes]], kind: str) -> None:
    """The library has a value for some of them, so that the tokenizer is read and must be saved."""
    content = real[kind]["tokenizer.json"]
    read = []
    for *outer, key in places(json.loads(content)):
        definition = json.loads(content)
        place = definition
        for name in outer:
            place = place[name]
        del place[key]
        changed = real[kind] | {"tokenizer.json": json.dumps(definition).encode()}
        if not refused(partial(use, changed)):
            read.append((*outer, key))
    assert ("normalizer", "strip_accents") in read or kind != "wordpiece"
    assert ("version",) in read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    export(FAMILIES["bert"], folder)
    return folder


def lies(draw: random.Random, content: bytes) -> bytes:
    """A file of weights whose header does not tell the truth."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry, other = header[name], header[draw.choice(sorted(header.keys() - {name, "__metadata__"}))]
    number: object = draw.choice([-1, 0, 1 << 31, 1 << 62, (1 << 64) - 1, 10**30, 1.5, None, "x", [], True])
    match draw.randrange(9):
        case 0:
            entry["shape"] = [number] * draw.randint(1, 4)
        case 1:
            entry["data_offsets"] = [entry["data_offsets"][0], number]
        case 2:
            entry["data_offsets"] = other["data_offsets"]
        case 3:
            entry["dtype"] = draw.choice(["F64", "I8", "O", "pickle", None, 3])
        case 4:
            header[name] = draw.choice([None, [], {}, "x", 3])
        case 5:
            header |= {f"more.{place}": entry for place in range(20_000)}
        case 6:
            return draw.choice([b"[", b'{"a":']) * 100_000
        case 7:
            return struct.pack("<Q", draw.choice([0, 1, len(content), 1 << 40, (1 << 64) - 1])) + content[8:]
        case _:
            text = b"[" * 150_000
            return struct.pack("<Q", len(text)) + text + body
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize("draw", [*range(2), *(pytest.param(draw, marks=pytest.mark.long) for draw in range(2, 1000))])
def test_weights_whose_header_lies(model: Path, tmp_path: Path, draw: int) -> None:
    """As a run reads them that starts from there: from headers, before ranks start."""
    config = read_folder_config(model)
    (tmp_path / WEIGHTS).write_bytes(lies(random.Random(draw), (model / WEIGHTS).read_bytes()))
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    said = refused(lambda: check_weights(config, open_store(str(tmp_path)), "mlm"))
    assert not said or str(tmp_path) in said


MODULES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer_config.json",
)


@pytest.mark.parametrize("draw", range(4))
def test_modules_of_a_folder_that_a_run_starts_from(model: Path, tmp_path: Path, draw: int) -> None:
    """What is copied into the run: nothing from outside the folder, and an error with the file's place."""
    draws, folder = random.Random(draw), tmp_path / "start/model"
    shutil.copytree(model, folder)
    write_sentence_transformer(folder, pooling="mean", normalize=True, max_length=16)
    (tmp_path / "start/secret.txt").write_text("secret")
    hostile = [
        b"[" * 100_000,
        b"9" * 6000,
        b"null",
        b"[3]",
        b'[{"path": "../"}]',
        b'[{"path": "/"}]',
        b'{"prompts": 3}',
    ]
    name = MODULES[draw % len(MODULES)]
    (folder / name).write_bytes(draws.choice(hostile))
    run, recipe = open_store(str(tmp_path / "run")), load(SMALL, (f"start={folder}",))
    said = refused(lambda: keep_modules(recipe, run))
    assert not said or str(folder) in said
    assert b"secret" not in b"".join(run.get(entry.key) for entry in run.list(""))
