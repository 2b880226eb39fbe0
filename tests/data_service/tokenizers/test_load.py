"""Published folders without `tokenizer.json` give the ids of transformers' own classes; unusable ones say what is
wrong. A decoder's tokenizer gets the special tokens that it lacks; every id and every text stays as it was.
"""

import json
import os
import pickle
import random
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.class_rules import FAMILY_BY_CLASS
from data_service.tokenizers.load import (
    complete_from_files,
    from_files,
    load_tokenizer,
    load_with_all_special_tokens,
    save_tokenizer,
)
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from tests.support.data.made_up import scripts_text
from tests.support.data.published_tokenizers import published_folder


@pytest.fixture
def files(trained: Callable[[Kind], Tokenizer]) -> dict[str, bytes]:
    return trained("byte_bpe").save_files()


def _definition(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    return {"tokenizer.json": json.dumps(json.loads(files["tokenizer.json"]) | changes).encode()}


DAMAGED = (b"", b"{", b"[]", b'{"model": 3}', b'{"model": {"type": "BPE"}}', b"\xff\xfe")
REFUSED: list[tuple[dict[str, bytes], str]] = [
    ({}, "tokenizer"),
    ({"tokenizer.json": pickle.dumps({"a": 1})}, r"tokenizer\.json.*pickle"),
    *(({"tokenizer.json": content}, r"definition|UTF-8") for content in DAMAGED),
    ({"vocab.txt": b"a\nb\n"}, r"vocab\.txt.*\[UNK\]"),
    *(({"spiece.model": content}, r"spiece\.model: ") for content in (b"not a model", b"")),
]


@pytest.mark.parametrize(("files", "problem"), REFUSED)
def test_what_is_no_tokenizer_is_refused_with_its_place(files: dict[str, bytes], problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem) as raised:
        from_files(files, where="s3://bucket/tok")
    assert "s3://bucket/tok" in raised.value.problem


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("part", "sequence", "rule"),
    [
        ("normalizer", "normalizers", ["Lowercase"]),
        ("pre_tokenizer", "pretokenizers", ["Whitespace"]),
        ("decoder", "decoders", ["Fuse"]),
    ],
)
def test_a_rule_as_a_list_which_the_library_takes_is_refused(
    files: dict[str, bytes], part: str, sequence: str, rule: list[str], inside: bool
) -> None:
    definition = json.loads(files["tokenizer.json"])
    definition[part] = {"type": "Sequence", sequence: [rule]} if inside else rule
    with pytest.raises(TokenizerError, match=part):
        from_files(files | {"tokenizer.json": json.dumps(definition).encode()})


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_names_of_roles_that_are_words_stay_text(files: dict[str, bytes], model: str) -> None:
    """Words between spaces are looked up whole, a role's name too."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: i for i, piece in enumerate([*names, "C", "N", "[DATE]"])}
    further = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    words = {
        "type": model,
        "vocab": vocabulary,
        "unk_token": "[UNK]",
        **(further if model == "WordPiece" else {}),
    }
    split = {"type": "WhitespaceSplit"}
    changes: dict[str, object] = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
    }
    ours = from_files(_definition(files, model=words, **changes))
    assert ours.kind == model.lower()
    assert ours.word_starts.all()
    assert ours.encode("C [CLS] [DATE] N [MASK] [PAD] Br [SEP]").tolist() == [5, 1, 7, 6, 1, 1, 1, 1]
    assert from_files(ours.save_files()).hash == ours.hash


def test_a_role_outside_the_vocabulary(files: dict[str, bytes]) -> None:
    config = {"tokenizer_config.json": b'{"mask_token": "<nope>"}'}
    with pytest.raises(TokenizerError, match=r"mask_token is '<nope>'"):
        from_files(files | config)


def test_a_tokenizer_without_a_mask(files: dict[str, bytes]) -> None:
    definition = json.loads(files["tokenizer.json"])
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] != "<mask>"]
    vocabulary = {("blank" if piece == "<mask>" else piece): i for piece, i in definition["model"]["vocab"].items()}
    definition["model"]["vocab"] = vocabulary
    with pytest.raises(TokenizerError, match=r"\bmask\b"):
        from_files({"tokenizer.json": json.dumps(definition).encode()})


def test_roles_given_as_objects_and_in_either_file(files: dict[str, bytes]) -> None:
    config = {"tokenizer_config.json": b'{"unk_token": {"content": "the"}, "cls_token": null}'}
    special = {"special_tokens_map.json": b'{"unk_token": "<unk>", "pad_token": "a"}'}
    tokenizer = from_files(_definition(files) | config | special)
    assert (tokenizer.names.unk, tokenizer.names.pad, tokenizer.names.cls) == ("the", "a", "<s>")


def test_merges_from_another_vocabulary(files: dict[str, bytes]) -> None:
    vocabulary = {"vocab.json": files["vocab.json"], "merges.txt": b"#version: 0.2\nqq zz\n"}
    with pytest.raises(TokenizerError, match=r"merges\.txt joins 'qq' and 'zz'"):
        from_files(vocabulary)


# ruff: noqa: RUF001


Folder = Callable[[str], Path]

SETTINGS = {
    "bert-uncased": ({"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}),
    "roberta": ({"add_prefix_space": True},),
    "deberta": ({"add_prefix_space": True},),
    "albert": ({"do_lower_case": False}, {"keep_accents": True}, {"additional_special_tokens": ["<new>"]}),
    "xlnet": (
        {"do_lower_case": True},
        {"keep_accents": True},
        {"additional_special_tokens": ["<eop>", "<eod>"]},
    ),
    "deberta-v3": ({"do_lower_case": True}, {"split_by_punct": True}, {"add_prefix_space": False}),
}


@pytest.fixture(scope="module")
def published(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    texts = [*documents[:8], *(scripts_text(seed) for seed in range(200))]
    return cache(lambda family: published_folder(family, texts, tmp_path_factory.mktemp("published") / family))


@pytest.fixture(scope="module")
def english(lines: list[str]) -> list[str]:
    return [line for line in lines if not any(name in line for name in ("[", "<"))][:1000]


def _same(folder: Path, texts: list[str]) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    found = [ids.tolist() for ids in ours.encode_batch(texts)]
    assert found == theirs(texts, add_special_tokens=False)["input_ids"]
    assert len(theirs) == ours.vocab_size
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert getattr(theirs, f"{role}_token_id") == getattr(ours.special, role)


@pytest.mark.parametrize(("family", "changed"), [(f, c) for f, changes in SETTINGS.items() for c in changes])
def test_settings_mean_what_they_mean_to_the_class(
    published: Folder, family: str, changed: dict[str, object], english: list[str], tmp_path: Path
) -> None:
    for path in published(family).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
    _same(
        tmp_path,
        [*english[:100], *(scripts_text(seed) for seed in range(100)), 'Ünïcode (ABC) "x" – £5.', "Ａ．Ｂ"],
    )


def test_the_class_of_the_tokenizer_decides_where_no_model_is_there(published: Folder, english: list[str]) -> None:
    model = {"spiece.model": (published("albert") / "spiece.model").read_bytes()}
    named = from_files(model | {"tokenizer_config.json": b'{"tokenizer_class": "AlbertTokenizerFast"}'})
    whole = load_tokenizer(str(published("albert")))
    assert named.hash == whole.hash
    assert from_files(model).hash != whole.hash  # as SentencePiece itself reads it
    alone = from_files({"spm.model": (published("deberta-v3") / "spm.model").read_bytes()})
    assert alone.hash == load_tokenizer(str(published("deberta-v3"))).hash


@pytest.mark.parametrize("other", [(), ("corpus/manifest.json",)])
def test_remains_of_a_killed_save_go_where_nobody_else_may_write(
    other: tuple[str, ...], files: dict[str, bytes], tmp_path: Path
) -> None:
    for name in (".tmp-killed", *other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / ".tmp-killed", (0, 0))
    save_tokenizer(from_files(files), str(tmp_path))
    assert (tmp_path / ".tmp-killed").exists() == bool(other)


@pytest.mark.parametrize("family", ["bert-cased", "deberta-v3"])
@pytest.mark.parametrize("form", ["file", "decoder"])
def test_added_tokens_keep_their_ids(published: Folder, family: str, form: str, tmp_path: Path) -> None:
    size = load_tokenizer(str(published(family))).vocab_size
    for path in published(family).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    known = {"[MASK]": size - 1} if family == "deberta-v3" else {}
    added = known | {"zünder": size, "flieger": size + 1}
    if form == "file":
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    else:
        flags = {"lstrip": False, "rstrip": False, "single_word": False}
        described = {
            str(i): flags | {"content": t, "normalized": t != "[MASK]", "special": t == "[MASK]"}
            for t, i in added.items()
        }
        settings = {"do_lower_case": False, "added_tokens_decoder": described}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    _same(tmp_path, ["a zünder flieger text", "zünderflieger", "plain"])
    ours = load_tokenizer(str(tmp_path))
    assert size in ours.encode("a zünder text")
    assert ours.special.mask == (size - 1 if known else ours.pieces.index("[MASK]"))


def test_added_tokens_with_other_ids_are_refused(published: Folder) -> None:
    files = {path.name: path.read_bytes() for path in published("bert-cased").iterdir()}
    with pytest.raises(TokenizerError, match=r"'x'.*\b5000\b"):
        from_files(files | {"added_tokens.json": b'{"x": 5000}'})


ODD_VALUES: tuple[object, ...] = (
    *(None, True, 0, 8.0, -1, 2**31, 2**40, 10**30, float("nan"), "", "abc", "no", "z" * 10_000, "\ud800", "\0"),
    *([], [None], [["a"]], [3, {"content": 3}], {}, {"content": 3}, {"content": "y"}, {"x": {"content": "y"}}),
)
ODD_KEYS = ("x", "", "-1", "1_0", " 8", "\u00b2", "8.0", "2147483648", "9" * 5_000, "\ud800")


def spoil(drawn: random.Random, value: object) -> object:
    """Return a copy of JSON of which one value, at any depth, or one key is an odd one."""
    if not isinstance(value, dict) or not value or drawn.random() < 0.05:
        return drawn.choice(ODD_VALUES)
    key = drawn.choice(sorted(value))
    if drawn.random() < 0.15:
        return {(drawn.choice(ODD_KEYS) if name == key else name): found for name, found in value.items()}
    return value | {key: spoil(drawn, value[key])}


def test_odd_values_are_read_or_refused_as_a_tokenizer(published: Folder) -> None:
    """In folders without `tokenizer.json`, by the rules of every class; the library is never given a huge id."""
    drawn, read, problems = random.Random(17), 0, list[str]()
    brackets = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<mask>", "<s>", "</s>", "a", "b"]
    pieces = {piece: i for i, piece in enumerate([*brackets, "ab"])}
    settings: dict[str, object] = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask")}
    settings |= dict.fromkeys(("do_lower_case", "keep_accents", "add_prefix_space", "legacy", "split_by_punct"), False)
    settings |= {"strip_accents": None, "extra_special_tokens": ["<x>"], "tokenizer_class": ""}
    token = {"content": "zz", "lstrip": False, "special": True}
    folders: list[tuple[dict[str, bytes], int]] = [
        ({"vocab.txt": "\n".join(pieces).encode()}, len(pieces)),
        ({"vocab.json": json.dumps(pieces).encode(), "merges.txt": b"a b\n"}, len(pieces)),
    ]
    folders += [({"spiece.model": (published("albert") / "spiece.model").read_bytes()}, 1_200)]
    for _ in range(600):
        files, size = drawn.choice(folders)
        name = f"{drawn.choice(sorted(FAMILY_BY_CLASS))}Tokenizer"
        contents: dict[str, object] = {
            "tokenizer_config.json": settings | {"tokenizer_class": name, "added_tokens_decoder": {str(size): token}},
            "special_tokens_map.json": {"unk_token": {"content": "[UNK]"}, "strip_accents": False},
            "added_tokens.json": {"zz": size},
            "config.json": {"model_type": "bert", "tokenizer_class": None},
            **({"vocab.json": pieces} if "vocab.json" in files else {}),
        }
        if drawn.random() < 0.5:
            contents["tokenizer_config.json"] = {"tokenizer_class": name}
        changed = drawn.choice(sorted(contents))
        contents[changed] = spoil(drawn, contents[changed])
        try:
            from_files(files | {name: json.dumps(content).encode() for name, content in contents.items()}, where="here")
            read += 1
        except TokenizerError as error:
            problems.append(error.problem)
    assert min(read, len(problems)) > 50
    assert all(problem.startswith("here: ") for problem in problems)


@pytest.mark.parametrize("number", [None, "z", True, 8.0, -1, 1 << 22, 2**31, 2**40])
def test_what_is_no_id_is_refused_with_its_file(number: object) -> None:
    pieces = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    vocabulary = {"vocab.json": json.dumps(pieces).encode(), "merges.txt": b""}
    described = {"added_tokens_decoder": {str(number): {"content": "q"}}}
    for name, content in (
        ("vocab.json", pieces | {"q": number}),
        ("added_tokens.json", {"q": number}),
        ("tokenizer_config.json", described),
    ):
        with pytest.raises(TokenizerError) as raised:
            from_files(vocabulary | {name: json.dumps(content).encode()})
        assert name in raised.value.problem
        assert str(number) in raised.value.problem


def test_line_ends_of_windows_are_no_part_of_a_piece(published: Folder, english: list[str]) -> None:
    files = {path.name: path.read_bytes() for path in published("bert-cased").iterdir()}
    windows = files | {"vocab.txt": files["vocab.txt"].replace(b"\n", b"\r\n")}
    assert from_files(windows).hash == from_files(files).hash
    bpe = {path.name: path.read_bytes() for path in published("roberta").iterdir()}
    windows = bpe | {"merges.txt": bpe["merges.txt"].replace(b"\n", b"\r\n")}
    assert from_files(windows).hash == from_files(bpe).hash


DECODER_TEXTS = ["the river, the stone", "maples and lanterns", "Zürich 日本 \n\t 12", "[MASK] <s> </s>", ""]
HELD_NAMES = {
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "<|finetune_right_pad_id|>"),
    "mask": ("<mask>", "[MASK]"),
}


def decoder(begin: str, end: str, more: dict[str, str], size: int = 290) -> dict[str, bytes]:
    """Files of a byte-level tokenizer whose configuration names what begins and ends a text, and `more` by role."""
    codec = tokenizers.Tokenizer(models.BPE())
    codec.pre_tokenizer, codec.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[begin, end, *more.values()],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    codec.train_from_iterator(DECODER_TEXTS[:3] * 4, trainer)
    roles = {"bos_token": begin, "eos_token": end} | {f"{role}_token": name for role, name in more.items()}
    return {"tokenizer.json": codec.to_str().encode(), "tokenizer_config.json": json.dumps(roles).encode()}


def test_ids_stay_and_missing_tokens_follow() -> None:
    draws = random.Random(3)
    for held in product((False, True), repeat=3):
        more = {role: draws.choice(HELD_NAMES[role]) for role, has in zip(HELD_NAMES, held, strict=True) if has}
        begin, end = draws.choice([("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"), ("A#", "B#")])
        files = decoder(begin, end, more, draws.choice([270, 280, 300]))
        before = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        found = complete_from_files(files)
        assert found.vocab_size == before.get_vocab_size() + held.count(False)
        assert found.pieces[: before.get_vocab_size()] == tuple(
            before.id_to_token(number) for number in range(before.get_vocab_size())
        )
        assert found.names.by_role() | more == found.names.by_role()
        assert (found.names.cls, found.names.sep) == (begin, end)
        for text in DECODER_TEXTS:
            if "[MASK]" not in text:
                assert found.encode(text).tolist() == before.encode(text, add_special_tokens=False).ids


def test_what_is_written_is_read_by_us_and_by_transformers(tmp_path: Path) -> None:
    found = complete_from_files(decoder("<|begin_of_text|>", "<|end_of_text|>", {}))
    save_tokenizer(found, str(tmp_path))
    assert load_tokenizer(str(tmp_path)).hash == load_with_all_special_tokens(str(tmp_path)).hash == found.hash
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    special = found.special
    assert (theirs.mask_token_id, theirs.pad_token_id) == (special.mask, special.pad)
    assert theirs("the river")["input_ids"] == [special.cls, *found.encode("the river").tolist(), special.sep]


def test_a_tokenizer_that_lacks_nothing_stays(tokenizer: Tokenizer) -> None:
    files = tokenizer.save_files()
    assert complete_from_files(files).hash == from_files(files).hash == tokenizer.hash


def test_what_encloses_a_row_must_be_known() -> None:
    files = decoder("<|begin_of_text|>", "<|end_of_text|>", {})
    with pytest.raises(TokenizerError, match="_token"):
        from_files(files)
    roles = json.loads(files["tokenizer_config.json"])
    for missing in ("bos_token", "eos_token"):
        config = json.dumps({key: name for key, name in roles.items() if key != missing})
        with pytest.raises(TokenizerError, match=missing):
            complete_from_files(files | {"tokenizer_config.json": config.encode()})
    wrong = json.dumps(roles | {"bos_token": "<|nowhere|>"})
    with pytest.raises(TokenizerError, match="bos_token"):
        complete_from_files(files | {"tokenizer_config.json": wrong.encode()})
