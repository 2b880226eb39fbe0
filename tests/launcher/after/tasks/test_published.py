"""Every bundled task over its folder as published: what is read, quirks of the files included."""

import re
from pathlib import Path

import numpy as np
import pytest

from launcher.after.tasks.examples import Answer, Questions, Retrieval, Sentences, TaggedSentences
from launcher.after.tasks.suite import bundled_suites, load_suite
from launcher.after.tasks.task import bundled_tasks, load_task, task_digest
from launcher.errors import TaskError
from tests.support.tasks import published_folders


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    published_folders.everything(folder)
    return folder


def sentences(name: str, root: Path, split: str = "dev") -> Sentences:
    examples = load_task(name, str(root)).read(split)
    assert isinstance(examples, Sentences)
    return examples


@pytest.mark.parametrize("name", bundled_tasks())
def test_every_bundled_task_reads_its_published_folder(name: str, root: Path) -> None:
    task = load_task(name, str(root))
    assert task.name == name
    assert task.about
    assert task.published.startswith("http")
    assert all(len(task.read(split)) > 0 for split in task.splits)
    assert len(task_digest(task)) == 64
    if task.kind not in ("similarity", "retrieval") and name != "ax":
        assert {"lr", "epochs", "batch", "max_length"} <= task.finetune.keys()
        assert {"train", "dev"} <= set(task.splits)


def test_a_missing_file_is_named_with_where_it_is_published(tmp_path: Path) -> None:
    task = load_task("cola", str(tmp_path))
    with pytest.raises(TaskError) as caught:
        task.read(task.splits[0])
    assert str(tmp_path) in caught.value.problem
    assert task.published in caught.value.remedy


def test_suites_name_bundled_tasks() -> None:
    assert set(bundled_suites()) >= {"glue", "squad", "clue", "sts", "senteval"}
    for name in bundled_suites():
        assert {task.name for task in load_suite(name)} <= bundled_tasks().keys()


SEMEVAL = [("A dog.", "A cat."), ("Rain.", "Sun.")]  # without the pair that nobody scored


@pytest.mark.parametrize(
    ("name", "split", "texts", "labels"),
    [
        ("cola", "dev", ["Our friends won't buy this analysis.", "They drank the pub."], [1, 0]),  # no names
        ("sst2", "dev", ['a "film', "good '' one "], [0, 1]),  # quotation marks are text
        ("ax", "test", [("The cat sat.", "The cat did not sit."), ("A cat sat.", "An animal sat.")], [0, 2]),
        ("sst5", "dev", ["a stirring film", "a dull one"], [4, 0]),
        ("csl", "dev", [("水声学 成像声呐", "为解决传统均匀"), ("支持向量机", "针对核函数")], [0, 1]),
        ("iflytek", "dev", ["朴朴快送超市", "打车"], [110, 0]),  # text or number in the file
        ("stsb", "dev", [("A plane.", "An air plane."), ('A "man', "A woman.")], [5.0, 0.4]),
        ("sts-benchmark", "test", [("A plane.", "An air plane."), ("A", "B")], [5.0, 0.25]),
        ("sick-r", "dev", [("Kids play", "Kids rest"), ("A", "A")], [3.3, 5.0]),
        ("sick-e", "dev", [("Kids play", "Kids rest"), ("A", "A")], [1, 2]),
        *(
            (f"sts{year}", "test", SEMEVAL * sets, [1.8, 4.0] * sets)
            for year, sets in ((12, 5), (13, 3), (14, 6), (15, 5), (16, 5))
        ),
    ],
)
def test_texts_and_labels(name: str, split: str, texts: list[object], labels: list[float], root: Path) -> None:
    examples = sentences(name, root, split)
    second = examples.second
    assert list(examples.first if second is None else zip(examples.first, second, strict=True)) == texts
    assert examples.labels.tolist() == labels
    assert examples.labels.dtype == (np.int64 if load_task(name).labels else np.float64)


def test_mrpcs_byte_order_marks_and_line_ends_are_nothing(root: Path) -> None:
    for split in ("train", "dev", "test"):
        mrpc = sentences("mrpc", root, split)
        assert mrpc.second is not None
        assert (mrpc.first[0], mrpc.second[0]) == ('He said "yes.', "He agreed.")


def test_qqp_rows_broken_by_a_line_end_are_left_out_and_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(sentences("qqp", root)) == 2
    assert re.search(r"\b2 rows\b", caplog.text)


def test_mnli_is_matched_and_mismatched_and_without_undecided_pairs(root: Path) -> None:
    assert load_task("mnli").splits == ("train", "dev", "mismatched")
    for split in ("dev", "mismatched"):
        assert sentences("mnli", root, split).labels.tolist() == [0, 1]


def test_splits_without_labels_are_refused(root: Path) -> None:
    with pytest.raises(TaskError, match=r"\bsplit \w+ .*\blabels\b"):
        load_task("cola", str(root)).read("test")


def test_clue_is_read_as_published(root: Path) -> None:
    task = load_task("tnews", str(root))
    assert [task.labels[label] for label in sentences("tnews", root).labels] == ["108", "104"]
    assert len(sentences("ocnli", root, "train")) == len(sentences("cmnli", root)) == 2


def test_squad_is_read_as_published(root: Path) -> None:
    first = load_task("squad", str(root)).read("dev")
    assert isinstance(first, Questions)
    assert first.answers == ((Answer("Denmark", 29), Answer("Denmark, Iceland and Norway", 29)),)
    second = load_task("squad2", str(root)).read("dev")
    assert isinstance(second, Questions)
    assert second.ids == ("56dd", "5ad3")
    assert second.answers[1] == ()  # plausible answers are none


def test_cmrc_answers_are_found_near_their_place(root: Path) -> None:
    examples = load_task("cmrc2018", str(root)).read("train")
    assert isinstance(examples, Questions)
    ((answer,),) = examples.answers
    assert answer == Answer("1963年", 6)  # the file says 7
    assert examples.contexts[0].startswith(answer.text, answer.start)


def test_conll_2003_in_bio(root: Path) -> None:
    task = load_task("conll2003", str(root))
    examples = task.read("train")
    assert isinstance(examples, TaggedSentences)
    assert examples.words == (("EU", "rejects", "German"), ("Peter", "Blackburn", "Smith"))
    names = [[task.labels[tag] for tag in tags] for tags in examples.tags]
    assert names == [["B-ORG", "O", "B-MISC"], ["B-PER", "I-PER", "B-PER"]]


def test_msra_has_spaces_as_words_and_a_dev_split_of_its_own(root: Path) -> None:
    task = load_task("msra-ner", str(root))
    test, train, dev = (task.read(split) for split in ("test", "train", "dev"))
    assert isinstance(test, TaggedSentences)
    assert test.words[0] == ("历", "博", "、", " ")
    assert len(train) + len(dev) == 202
    assert 0 < len(dev) < 40


def test_senteval_is_split_without_overlap_and_keeps_its_labels(root: Path) -> None:
    for name in ("mr", "cr", "subj", "mpqa"):
        task = load_task(name, str(root))
        splits = [sentences(name, root, split) for split in ("train", "dev", "test")]
        texts = [set(examples.first) for examples in splits]
        assert sum(len(found) for found in texts) == len(set.union(*texts)) == 200
        for examples in splits:  # the label is the file's
            for text, label in zip(examples.first, examples.labels, strict=True):
                assert task.labels[int(label)].startswith(text.split()[0])
    trec = load_task("trec", str(root))
    test = sentences("trec", root, "test")
    assert test.first[-2] == "What is the film about René ?"
    assert [trec.labels[label] for label in test.labels[-3:]] == ["NUM", "ENTY", "ABBR"]


def test_beir_and_nanobeir_are_read_as_published(root: Path) -> None:
    beir = load_task("scifact", str(root)).read("test")
    assert beir == Retrieval(
        queries={"q1": "What is nothing?"},
        documents={"d1": "Zero Nothing at all.", "d2": "Everything.", "d3": "Something."},
        relevant={"q1": {"d1": 2}},
    )
    nano = load_task("nanoscifact", str(root)).read("test")
    assert nano == Retrieval({"q1": "Which?"}, {"d1": "One", "d2": "Two"}, {"q1": {"d2": 1}})
