"""A mistake that can be seen from the arguments is told before anything heavy is imported and any network is asked."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks.command import command_tree
from tests.support.runs.small_runs import new_run

# Ends a command that imports one of these, or opens a connection, in a way that none of them catches.
_DRIVER = """
import io, json, socket, sys
from contextlib import redirect_stderr, redirect_stdout
class Heavy(BaseException): ...
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "ray", "transformers", "deepspeed", "sentence_transformers", "datasets", "boto3"):
            raise Heavy("import " + name)
def refuse(*arguments): raise Heavy("network")
sys.meta_path.insert(0, Finder())
socket.socket.connect = refuse
from launcher.app.cli.main import main
for line in sys.stdin:
    sys.argv, said, code = ["maskfleet", *json.loads(line)], io.StringIO(), 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            main()
    except SystemExit as end:
        code = end.code
    except Heavy as heavy:
        code = str(heavy)
    except Exception as error:
        code = repr(error)
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
# A command line of each command that is right. Braces: places that are there, or `new`, or `gone`.
RIGHT = {
    "checkpoints average": "{run} --out {new} --last 2",
    "checkpoints export": "{run} --out {new} --step 3",
    "checkpoints list": "{run}",
    "checkpoints verify": "{run}",
    "corpus append": "{corpus} {text} --out {new} --workers 1 --text-field body --txt-documents blank_line --encoding "
    "utf-8 --delimiter ; --on-bad-bytes error --on-bad-records skip",
    "corpus build": "{text} --out {new} --tokenizer {tokenizer} --heldout 0.1 --workers 1 --negatives 1 --texts pairs "
    "--txt-documents file --segmenter jieba --sentences any --encoding utf-8 --delimiter ; --on-bad-bytes error "
    "--on-bad-records skip --block-tokens 4096 --max-document-bytes 4096",
    "corpus find": "{corpus} --id a",
    "corpus merge": "{corpus} {corpus} --out {new}",
    "corpus card": "{corpus}",
    "corpus prepare": "{prepare} {new} --workers 1",
    "corpus remove": "{corpus} --ids {text} --reason asked",
    "corpus show": "{corpus} --index 1 --count 1 --split train",
    "corpus similar-words": "{corpus} --out {new} --size 8 --window 2 --epochs 1 --least 2 --neighbours 3 "
    "--most-tokens 9 --seed 3",
    "corpus stats": "{corpus} --batch 8 --length 64",
    "corpus verify": "{corpus}",
    "demo": "{text} --out {new} --encoding utf-8",
    "diagnose": "{model} --task sst2 --pooling cls --limit 10 --step 3",
    "doctor": "",
    "embed eval": "{model} stsb --data {data} --pooling mean --max-length 32 --batch 8 --step 3 --split dev",
    "embed negatives": "{model} {text} --out {new} --negatives 2 --share 0.9 --pooling cls --max-length 32 --batch 8 "
    "--step 3",
    "embed settings": "nli",
    "embed train": "{model} stsb --data {data} --out {new} --set epochs=1 --step 3",
    "estimate": "roberta-base --nodes 2 --gpus-per-node 8 --gpu H100 --mfu 0.3 --mtbf-hours 100 --text 160GB "
    "--set zero=1",
    "evaluate": "{model} sst2 --results {new} --task sst2 --seeds 1 --set lr=1e-3 --step 3 --cpus-per-cell 1 "
    "--gpus-per-cell 0",
    "fill": "{model} <mask> --step 3 --steps 2 --temperature 0.5 --seed 1",
    "finetune": "{model} sst2 --out {new} --data {data} --set lr=1e-3 --seed 3 --step 3",
    "init": "quickstart {new} --corpus {corpus} --set seed=3 --tokenizer {tokenizer}",
    "launch aws-batch": "{run} --image i --instance-type p4d.24xlarge --vpc vpc-1 --subnet s-1 --efa 1 --disk 10GiB "
    "--attempts 2 --name a --set zero=1 --env A --nodes 2 --cpus-per-node 4 --memory 8GiB --gpus-per-node 1 "
    "--shared-memory 4GiB",
    "launch kuberay": "{run} --image i --nodes 2 --cpus-per-node 4 --memory 8GiB --namespace n --retries 3 "
    "--node-selector a=b --head-selector a=b --service-account d --secret s",
    "launch ray": "{run} --image i --region us-east-1 --instance-type p4d --nodes 2 --cpus-per-node 4 --memory 8GiB "
    "--ami a --ssh-user u --worker-profile p --disk 20GiB",
    "launch ray-job": "{run} --address http://a:1 --nodes 2 --set zero=1",
    "launch slurm": "{run} --nodes 2 --cpus-per-node 4 --memory 8GiB --time 24:00:00 --partition p --account a --qos q "
    "--constraint c --log x.log --sbatch=--exclusive --env A --name a --container i.sqsh",
    "preflight": "{run}",
    "recipe check": "quickstart --set seed=3",
    "recipe diff": "quickstart bert-base",
    "recipe from": "{model}",
    "recipe list": "",
    "recipe show": "quickstart --set seed=3",
    "report": "{run} --out {new}",
    "runs certify": "{run}",
    "runs exposure": "{run} --document text:1",
    "runs fork": "{run} {new} --step 3 --set seed=4 --decay 3",
    "runs status": "{run}",
    "runs stop": "{run}",
    "runs verify": "{run}",
    "runs watch": "{run} --port 0 --host 127.0.0.1",
    "show": "{run} --step 1 --row 1",
    "tasks check": "sst2 --data {data}",
    "tasks list": "",
    "tasks ngrams": "sst2 --data {data} --out {new} --file {text} --text-field text",
    "tasks show": "sst2",
    "tokenizer check": "{tokenizer} {text} --sample-mb 1 --encoding utf-8 --delimiter ;",
    "tokenizer extend": "{tokenizer} {new} --terms {text}",
    "tokenizer train": "{text} --out {new} --vocab-size 300 --kind wordpiece --sample-mb 1 --encoding utf-8 "
    "--delimiter ; --on-bad-bytes error --on-bad-records skip",
    "train": "{run} --without-removed --set zero=1 --nodes 2 --recipe quickstart",
}
# Values that cannot be, of options whose type does not say so.
WRONG = {
    "--allow": "everything",
    "--batch": "0",
    "--budget": "much",
    "--disk": "big",
    "--document": "text",
    "--encoding": "utf-9",
    "--env": "A=secret",
    "--gpu": "H7",
    "--head-selector": "a",
    "--heldout": "1.5",
    "--max-length": "-3",
    "--memory": "much",
    "--mfu": "30",
    "--name": "A B",
    "--node-selector": "a",
    "--partition": "a b",
    "--pooling": "median",
    "--sbatch": "-N2",
    "--set": "seed",
    "--share": "1.5",
    "--shared-memory": "much",
    "--step": "x",
    "--task": "sst3",
    "--text": "160XB",
    "--texts": "poems",
    "--time": "tomorrow",
    "--vocab-size": "-1",
    "--container": "a\nb",
}
# Words of arguments and options that name something, and what is not there in its place.
NAMED = (
    "{run}",
    "{corpus}",
    "{text}",
    "{model}",
    "{prepare}",
    "quickstart",
    "roberta-base",
    "bert-base",
    "sst2",
    "stsb",
    "nli",
)


TREE = command_tree()


def mistakes() -> Iterator[list[str]]:
    """Every command with one argument or option wrong."""
    for command, right in RIGHT.items():
        words = right.split()
        options = {option: one for one in TREE[command].params for option in one.opts}
        for at, word in enumerate(words):
            before = words[at - 1] if at else ""
            option, equals, _ = word.partition("=")
            if word.startswith("--") and equals:
                yield [*command.split(), *words[:at], f"{option}={WRONG[option]}", *words[at + 1 :]]
            elif word.startswith("--"):
                yield [*command.split(), *words[:at], f"{word}x", *words[at + 1 :]]
            elif before in WRONG:
                wrong = [*words[:at], WRONG[before], *words[at + 1 :]]
                if before != "--text" or "{" not in word:  # of `diagnose` it is a file
                    yield [*command.split(), *wrong]
            elif before in options and _is_narrow(options[before].bare_type):
                yield [*command.split(), *words[:at], "many", *words[at + 1 :]]
            if word in NAMED and before not in ("--recipe", "--task") and command != "runs watch":  # it waits for runs
                yield [*command.split(), *words[:at], "{gone}", *words[at + 1 :]]
    yield ["init", "quickstart", "{run}"]
    yield ["runs", "fork", "{run}", "{run}"]
    yield ["wacth", "{run}"]
    yield ["runs", "wacth", "{run}"]


def _is_narrow(kind: object) -> bool:
    """Whether not every word is a value of it."""
    return isinstance(kind, type) and (issubclass(kind, Enum) or kind in (int, float))


@pytest.fixture(scope="module")
def places(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("places")
    for name in ("model", "data"):
        (made / name).mkdir()
    (made / "model/config.json").write_text("{}")
    (made / "text.txt").write_text("Some text.\n")
    (made / "prepare.yaml").write_text(f"inputs: [{{uri: {made}/text.txt, source: text}}]\nstages: []\n")
    found = {name: str(made / name) for name in ("model", "data", "new", "gone")}
    return found | {
        "text": str(made / "text.txt"),
        "prepare": str(made / "prepare.yaml"),
        "corpus": str(inputs / "corpus"),
        "tokenizer": str(inputs / "tokenizer"),
        "run": new_run(inputs, str(made / "run")),
    }


def test_every_command_is_tried() -> None:
    assert RIGHT.keys() == TREE.keys()


def told(lines: list[list[str]], places: dict[str, str]) -> list[tuple[list[str], Any, str]]:
    asked = [[word.format(**places) if "{" in word else word for word in line] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=places["data"],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), done.stderr
    return [(line, code, said) for line, (code, said) in zip(lines, answers, strict=True)]


@pytest.mark.parametrize("most", [50, pytest.param(10_000, marks=pytest.mark.long)])
def test_mistakes_are_told_before_what_is_heavy(places: dict[str, str], most: int) -> None:
    """Arguments and options of all commands that may be wrong, drawn at random, or every one; in any order, since a
    failed import leaves traces."""
    lines = list(mistakes())
    random.Random(3).shuffle(lines)
    lines = lines[:most]
    wrong = [
        (" ".join(line), code, said[-300:])
        for line, code, said in told(lines, places)
        if code != 2 or "Traceback" in said or not said.strip()
    ]
    assert wrong == []


def test_what_is_right_goes_on(places: dict[str, str]) -> None:
    """Else nothing would have been looked at: such a command is ended by its first import, or does its work."""
    heavy = {
        "finetune",
        "embed eval",
        "embed negatives",
        "embed train",
        "evaluate",
        "diagnose",
        "fill",
        "recipe from",
    }
    lines = [[*command.split(), *RIGHT[command].split()] for command in sorted(heavy)]
    found = told(lines, places)
    assert [one for one in found if str(one[1]).split()[0] != "import"] == []
    ((_, code, _),) = told([["init", *RIGHT["init"].split()]], places)
    assert code == 0
