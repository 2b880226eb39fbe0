"""A task's YAML: what does not go together is named by file, line, path and remedy; suites change tasks."""

from pathlib import Path

import pytest
import ray

from launcher.after.tasks.examples import examples_digest
from launcher.after.tasks.suite import load_suite
from launcher.after.tasks.task import load_task, parse_task
from launcher.errors import TaskError

MINE = """\
name: mine
kind: classification
published: https://example.org
files: {train: train.tsv, dev: dev.tsv}
format: tsv
fields: {first: text, label: label}
labels: ["no", "yes"]
metrics: [accuracy]
"""


@pytest.mark.parametrize(
    ("before", "after", "problem", "remedy"),
    [
        ("metrics:", "metrix:", "mine.yaml:8: metrix is not a key of a task", "did you mean metrics?"),
        ("first:", "frist:", "mine.yaml:6: fields.frist is not a key of a task", "did you mean first?"),
        ("kind: classification", "kind: clasification", 'mine.yaml:2: kind = "clasification"', "correct kind"),
        ("[accuracy]", "[acuracy]", 'mine.yaml:8: metrics.0 = "acuracy"', "metrics"),
        ("[accuracy]", "[accuracy, pearson]", "mine.yaml:8: metrics.1: pearson is not a metric of", "macro_f1"),
        ("[accuracy]", "[accuracy, accuracy]", "mine.yaml:8: metrics.1: accuracy", "each once"),
        ('["no", "yes"]', '["no", "yes", "so"]\nskip_labels: ["so"]', "mine.yaml:7: labels.2", "keep one"),
        ('["no", "yes"]', "[0, 1]", "mine.yaml:7: labels.0 = 0: input should be a valid string", "labels.0"),
        ('["no", "yes"]', '["no"]', "mine.yaml:7: labels: classification needs at least two", "list them"),
        ("[accuracy]", "[f1]\nlabel_ids: 3", "mine.yaml:9: label_ids = 3", "label_ids"),
        ("format: tsv", "format: columns", "mine.yaml:5: format: columns cannot hold classification", "jsonl"),
        ("{first: text, label: label}", "{first: text}", "mine.yaml:6: fields: no field 'label'", "number"),
        ("first: text", "first: 1", "mine.yaml:6: fields: 1, label", "only names"),
        ("{first: text, label: label}", "{first: 0, label: 1}", "fields: 0, 1", "from 1"),
        ("dev: dev.tsv", "dev: []", "mine.yaml:4: files.dev: no file", "leave the split out"),
        ("dev: dev.tsv", "dev: {path: a, label: so}", "files.dev: the label 'so' is not one of", "add it"),
        ("dev: dev.tsv", "dev: {path: a, gold: b}", "mine.yaml:4: files.dev: gold (labels) needs texts", "txt"),
        ("dev: dev.tsv}", "dev: dev.tsv}\nunlabelled: [tset]", "unlabelled.0: tset is not a split", "train, dev"),
        ("dev: dev.tsv}", "dev: dev.tsv}\nheld_out: {dev: 0.1}", "held_out.dev: the split dev is in files", "out"),
        ("dev: dev.tsv}", "dev: dev.tsv}\nheld_out: {test: 1.5}", "mine.yaml:5: held_out.test = 1.5", "correct"),
        ("name: mine", "name: Mine!", 'mine.yaml:1: name = "Mine!"', "name"),
        ("name: mine", "name: mine\nname: two", "mine.yaml:2: name is given twice", "keep one"),
        ("name: mine", "name: mine\nscore_range: [0.0, 1.0]", "score_range: classification", "leave"),
        ("name: mine", "- name", "not valid YAML", "fix"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(before: str, after: str, problem: str, remedy: str) -> None:
    assert before in MINE
    with pytest.raises(TaskError) as caught:
        parse_task(MINE.replace(before, after, 1), "mine.yaml", None)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(TaskError, match=r"x: published\b.* files\b.* format\b.* metrics\b"):
        parse_task("name: x\nkind: tagging\n", "x", None)


def test_a_files_paths_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "dev.tsv").write_text("text\tlabel\na\tno\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dev.tsv").write_text("text\tlabel\nb\tyes\n")
    path = str(tmp_path / "mine.yaml")
    assert load_task(path).read("dev").first == ("a",)  # type: ignore[union-attr]
    assert load_task(path, str(elsewhere)).read("dev").first == ("b",)  # type: ignore[union-attr]
    absolute = MINE.replace("dev.tsv", str(elsewhere / "dev.tsv"))
    assert parse_task(absolute, "mine.yaml", str(tmp_path)).read("dev").first == ("b",)  # type: ignore[union-attr]
    with pytest.raises(TaskError, match=r"\bsplit 'tset'"):
        load_task(path).read("tset")


def test_a_task_travels_to_a_worker_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("text\tlabel\na\tno\n")
    task = parse_task(MINE, "mine.yaml", str(tmp_path)).model_copy(update={"finetune": {"lr": 1e-5}})
    sent = ray.cloudpickle.loads(ray.cloudpickle.dumps(task))
    assert (sent, sent.root) == (task, str(tmp_path))
    assert examples_digest(sent.read("dev")) == examples_digest(task.read("dev"))


def test_labels_may_be_indices_where_files_have_one_class_each(tmp_path: Path) -> None:
    files = '{dev: [{path: a, label: "no"}, {path: b, label: "yes"}]}'
    text = MINE.replace("{train: train.tsv, dev: dev.tsv}", files).replace(
        "format: tsv", "format: txt\nlabel_ids: true"
    )
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}\n\n{name}{name}\n")
    task = parse_task(text.replace("fields: {first: text, label: label}\n", ""), "mine.yaml", str(tmp_path))
    assert task.read("dev").labels.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_a_suite_changes_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "small.yaml").write_text(
        "name: small\ntasks: [sst2, mine.yaml, {task: rte, finetune: {epochs: 5}, data: other}]\n"
    )
    first, mine, rte = load_suite(str(tmp_path / "small.yaml"), "data")
    assert (first.name, first.root, mine.name, mine.root) == ("sst2", "data", "mine", "data")
    assert (rte.finetune["epochs"], rte.finetune["batch"], rte.root) == (5, 16, "other")
    beside = [task.root for task in load_suite(str(tmp_path / "small.yaml"))]
    assert beside == [str(tmp_path), str(tmp_path), "other"]
    assert [task.name for task in load_suite(str(tmp_path / "mine.yaml"))] == ["mine"]
    (tmp_path / "small.yaml").write_text("name: small\ntasks: [sst2, {task: sst2}]\n")
    with pytest.raises(TaskError, match=r"\btwo\b.*\bsst2\b"):
        load_suite(str(tmp_path / "small.yaml"))
    (tmp_path / "small.yaml").write_text("name: small\ntasks:\n  - {task: sst2, finetun: {}}\n")
    with pytest.raises(TaskError, match=r"small\.yaml:3"):
        load_suite(str(tmp_path / "small.yaml"))
