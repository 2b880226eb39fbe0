"""The linear probe: it finds what is linearly there, finds nothing where there is nothing, and reads its files."""

import random
from pathlib import Path

import pytest
import torch
from small_runs import WORDS

from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.bert import BertConfig
from encoder_core.families.build import AnyEncoder, build_encoder
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from launcher.errors import RunError
from launcher.probe import Frame, Labelled, Task, probe, read_task

SHAPE = {"layers": 1, "hidden": 64, "heads": 2, "feed_forward": 64, "max_length": 32, "vocab": 320}


def labelled(draw: random.Random, count: int, *, told: bool) -> Labelled:
    """Sentences whose class is whether a certain word is in them, or drawn anew if not `told`."""
    sentences, labels = [], []
    for _ in range(count):
        label = draw.randint(0, 1)
        words = draw.choices([word for word in WORDS if word != "machine"], k=6) + ["machine"] * label
        draw.shuffle(words)
        sentences.append(" ".join(words))
        labels.append(label if told else draw.randint(0, 1))
    return Labelled(tuple(sentences), torch.tensor(labels))


@pytest.mark.parametrize("family", ["bert", "xlnet"])
def test_a_word_is_found_and_noise_is_not(family: str, inputs: Path) -> None:
    config = BertConfig(**SHAPE) if family == "bert" else XlnetConfig(**SHAPE)
    torch.manual_seed(0)
    encoder: AnyEncoder = build_encoder(config)
    initialise(encoder)
    tokenizer, draw = load_tokenizer(str(inputs / "tokenizer")), random.Random(5)
    accuracies = [
        probe(
            encoder,
            tokenizer,
            Frame(32, first_is_last=family == "xlnet"),
            Task(*(labelled(draw, count, told=told) for count in (300, 100, 200))),
        )
        for told in (True, False)
    ]
    assert accuracies[0] > 0.95
    assert 0.35 < accuracies[1] < 0.65


def test_a_task_is_read(tmp_path: Path) -> None:
    for name, text in (("train", "a b\t1\nc d\t0\n"), ("dev", "e\t1\n"), ("test", 'a "quoted" one\t0\n')):
        (tmp_path / f"{name}.tsv").write_text(text)
    task = read_task(tmp_path)
    assert task.train.sentences == ("a b", "c d")
    assert task.train.labels.tolist() == [1, 0]
    assert task.test.sentences == ('a "quoted" one',)


@pytest.mark.parametrize("text", ["no class\n", "a\tpositive\n", "a\tb\t1\n"])
def test_a_bad_line_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("fine\t1\n" + text)
    with pytest.raises(RunError, match=r"train\.tsv, line 2"):
        read_task(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"train\.tsv does not exist"):
        read_task(tmp_path)
