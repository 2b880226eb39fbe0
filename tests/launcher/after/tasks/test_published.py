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
    read = {split: task.read(split) for split in task.splits}
    assert all(len(examples) > 0 for examples in read.values())
    assert len(task_digest(task)) == 64


@pytest.mark.parametrize("name", bundled_tasks())
def test_a_missing_file_is_named_with_where_it_is_published(name: str, tmp_path: Path) -> None:
    task = load_task(name, str(tmp_path))
    with pytest.raises(TaskError) as caught:
        task.read(task.splits[0])
    assert str(tmp_path) in caught.value.problem
    assert task.published in caught.value.remedy


def test_suites_name_bundled_tasks() -> None:
    assert set(bundled_suites()) >= {"glue", "squad", "clue", "sts", "senteval"}
    for name in bundled_suites():
        assert {task.name for task in load_suite(name)} <= bundled_tasks().keys()
    assert [task.name for task in load_suite("glue")] == [
        "cola",
        "sst2",
        "mrpc",
        "stsb",
        "qqp",
        "mnli",
        "qnli",
        "rte",
    ]


def test_cola_has_no_line_of_names(root: Path) -> None:
    examples = sentences("cola", root)
    assert examples.first == ("Our friends won't buy this analysis.", "They drank the pub.")
    assert examples.labels.tolist() == [1, 0]


def test_quotation_marks_and_marks_of_byte_order_are_text_and_nothing(root: Path) -> None:
    assert sentences("sst2", root).first == ('a "film', "good '' one ")
    for split in ("train", "dev", "test"):  # MRPC's files begin with a byte order mark, its lines end in \r\n
        mrpc = sentences("mrpc", root, split)
        assert mrpc.second is not None
        assert (mrpc.first[0], mrpc.second[0]) == ('He said "yes.', "He agreed.")


def test_qqp_rows_broken_by_a_line_end_are_left_out_and_counted(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(sentences("qqp", root)) == 2
    assert re.search(r"\b2 rows\b", caplog.text)


def test_mnli_is_matched_and_mismatched_and_without_undecided_pairs(root: Path) -> None:
    assert load_task("mnli").splits == ("train", "dev", "mismatched")
    for split in ("dev", "mismatched"):
        assert sentences("mnli", root, split).labels.tolist() == [0, 1]
    diagnostic = sentences("ax", root, "test")
    assert diagnostic.first == ("The cat sat.", "A cat sat.")
    assert diagnostic.labels.tolist() == [0, 2]


def test_splits_without_labels_are_refused(root: Path) -> None:
    with pytest.raises(TaskError, match=r"\bsplit \w+ .*\blabels\b"):
        load_task("cola", str(root)).read("test")


def test_scores_of_pairs(root: Path) -> None:
    examples = sentences("stsb", root)
    assert examples.labels.dtype == np.float64
    assert examples.labels.tolist() == [5.0, 0.4]
    benchmark = sentences("sts-benchmark", root, "test")
    assert benchmark.second == ("An air plane.", "B")
    assert benchmark.labels.tolist() == [5.0, 0.25]


@pytest.mark.parametrize(
    ("name", "sets"), [("sts12", 5), ("sts13", 3), ("sts14", 6), ("sts15", 5), ("sts16", 5)]
)
def test_semeval_pairs_that_nobody_scored_are_left_out(name: str, sets: int, root: Path) -> None:
    examples = sentences(name, root, "test")
    assert examples.first == ("A dog.", "Rain.") * sets
    assert examples.second == ("A cat.", "Sun.") * sets
    assert examples.labels.tolist() == [1.8, 4.0] * sets


def test_clue_is_read_as_published(root: Path) -> None:
    task = load_task("tnews", str(root))
    assert [task.labels[label] for label in sentences("tnews", root).labels] == ["108", "104"]
    assert sentences("iflytek", root).labels.tolist() == [110, 0]  # text or number in the file
    assert sentences("csl", root).first == ("水声学 成像声呐", "支持向量机")
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
    fine = sentences("sst5", root)
    assert (fine.first, fine.labels.tolist()) == (("a stirring film", "a dull one"), [4, 0])
    assert sentences("sick-r", root).labels.tolist() == [3.3, 5.0]
    assert sentences("sick-e", root).labels.tolist() == [1, 2]


def test_beir_and_nanobeir_are_read_as_published(root: Path) -> None:
    beir = load_task("scifact", str(root)).read("test")
    assert beir == Retrieval(
        queries={"q1": "What is nothing?"},
        documents={"d1": "Zero Nothing at all.", "d2": "Everything.", "d3": "Something."},
        relevant={"q1": {"d1": 2}},
    )
    nano = load_task("nanoscifact", str(root)).read("test")
    assert nano == Retrieval({"q1": "Which?"}, {"d1": "One", "d2": "Two"}, {"q1": {"d2": 1}})
