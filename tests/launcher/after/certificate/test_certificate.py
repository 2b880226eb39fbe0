"""The certificate of a run: each changed byte is found and named, and what a run may do afterwards is no damage."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from checkpoints.attempt import Attempt
from checkpoints.listing import committed, read_manifest
from checkpoints.load import Reader
from data_service.errors import UserError
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher.after.certificate.certify import certify
from launcher.after.certificate.examine import Examination, examine
from launcher.after.certificate.facts import weights_digest
from launcher.after.certificate.retrain import retrain
from launcher.after.certificate.signature import ENVELOPE, read_private_key, read_public_key
from launcher.after.certificate.statement import CERTIFICATE, Statement
from launcher.after.certificate.stored import certificate_of, given_certificate
from launcher.after.export.export import export_run
from launcher.app.cli.main import app
from launcher.errors import CertificateError
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.record import open_run
from launcher.runtime.run.teachers import FoundTeacher
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.small_runs import new_run, operate

SHORT = (
    "phases=[{steps: 6, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 2}, keep_last: 2}",
    "evaluation={every: {steps: 3}, samples: 12}",
    "logging={flush_seconds: 0.01, tensorboard: true}",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a certified run of two attempts over it."""
    root = tmp_path_factory.mktemp("certified")
    small_runs.prepare_corpus(root)
    run = new_run(root, "run", *SHORT)
    finish(run, 2, stop_at=3)
    finish(run, 1)
    Attempt(open_store(run), 2).end(time.time())
    statement, found = certify(run)
    assert statement is not None, found.problems
    return root


@pytest.fixture
def run(root: Path, tmp_path: Path) -> str:
    """A copy of the run, which a test may change. It reads the same corpus."""
    shutil.copytree(root / "run", tmp_path / "run")
    return str(tmp_path / "run")


def verified(run: str) -> Examination:
    return examine(run, certificate_of(run))


def sound(run: str) -> Examination:
    found = verified(run)
    assert not found.problems
    return found


def named(run: str) -> str:
    """What verification says, whether it ends in an error or with a list."""
    try:
        return "\n".join(f"{problem.place} {problem.what}" for problem in verified(run).problems)
    except UserError as error:
        return error.problem


def changed_bytes(root: Path, count: int, draw: random.Random) -> Iterator[Path]:
    """Turn one bit over in a file of the run or of its corpus, drawn at random; yield the file; turn it back."""
    files = [
        path for part in ("run", "corpus") for path in sorted((root / part).rglob("*")) if path.is_file()
    ]
    for _ in range(count):
        path = draw.choice([file for file in files if file.stat().st_size])
        before = path.read_bytes()
        after, at = bytearray(before), draw.randrange(len(before))
        after[at] ^= 1 << draw.randrange(8)
        path.write_bytes(after)
        yield path
        path.write_bytes(before)


def check_changes(root: Path, count: int, seed: int) -> None:
    """A change in the corpus's manifest or tokenizer, or in the certificate, is named by that file, too."""
    for path in changed_bytes(root, count, random.Random(seed)):
        assert path.name in named(str(root / "run")), path
    sound(str(root / "run"))


@pytest.mark.long
def test_a_byte_that_is_changed_anywhere_is_named(root: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    check_changes(root, 40, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_changed_anywhere_are_named(root: Path, seed: int) -> None:
    check_changes(root, 200, seed)


@pytest.mark.long
def test_a_run_that_goes_on_makes_the_certificate_older_and_not_wrong(root: Path) -> None:
    run = new_run(root, "longer", *SHORT)
    finish(run, 1, stop_at=3)
    first, _ = certify(run)
    assert first is not None
    finish(run, 1)
    shutil.rmtree(Path(run, committed(open_store(run))[-1].folder))  # as retention does
    found = sound(run)
    assert any("newer" in note for note in found.notes)
    assert any("no longer kept" in note for note in found.notes)
    second, found = certify(run)
    assert second is not None, found.problems
    assert second.predicate.chain[: len(first.predicate.chain)] == first.predicate.chain
    kept = {f"commit of step {mark.step}, attempt {mark.attempt}" for mark in committed(open_store(run))}
    assert {link.what for link in first.predicate.chain if link.what.startswith("commit")} - kept
    assert kept <= second.newest.keys()
    again, _ = certify(run)
    assert again == second


@pytest.mark.long
def test_segments_may_be_packed(run: str) -> None:
    store = LocalStore(Path(run))
    while pack_once(store, 1, over=True, most_segments=3):
        pass
    assert next(iter(store.list("metrics/a000001/"))).key.endswith(".parquet")
    sound(run)
    key = next(entry.key for entry in store.list("metrics/a000001/") if entry.key.endswith(".parquet"))
    store.delete(key)
    assert "metrics/a000001/" in named(run)


@pytest.mark.long
def test_settings_may_change_and_a_new_certificate_says_so(run: str) -> None:
    operate(run, "logging.flush_seconds=5")
    assert "recipe.yaml" in named(run)
    before = certificate_of(run)
    statement, found = certify(run)
    assert statement is not None
    assert before is not None
    assert any("recipe.yaml" in note for note in found.notes)
    assert statement.newest["recipe"] != before.newest["recipe"]
    assert statement.newest["event 0 between attempts"]["kind"] == "recipe_changed"
    sound(run)


def test_what_must_not_change_is_not_certified_again(run: str) -> None:
    (segment, *_) = sorted(Path(run, "metrics/a000002").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b'"loss":', b'"lass":', 1))
    before = Path(run, CERTIFICATE).read_bytes()
    statement, found = certify(run)
    assert statement is None
    assert [problem.place for problem in found.problems] == [str(segment)]
    assert Path(run, CERTIFICATE).read_bytes() == before


@pytest.mark.long
def test_a_copy_elsewhere_with_its_corpus_is_the_same(root: Path, run: str, tmp_path: Path) -> None:
    shutil.copytree(root / "corpus", tmp_path / "corpus")
    there = examine(run, certificate_of(str(root / "run")), corpora={"text": str(tmp_path / "corpus")})
    assert not there.problems
    (shard,) = (tmp_path / "corpus" / "train").iterdir()
    with shard.open("r+b") as file:
        file.seek(700)
        file.write(b"\xff")
    there = examine(run, certificate_of(run), corpora={"text": str(tmp_path / "corpus")})
    assert {problem.place for problem in there.problems} == {str(shard)}


def test_another_corpus_is_not_the_run_s(root: Path, run: str, tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=31)
    found = examine(run, certificate_of(run), corpora={"text": str(tmp_path / "corpus")})
    assert [problem.place for problem in found.problems] == [f"{tmp_path}/corpus/manifest.json"]


def test_weights_have_the_digest_that_they_have_as_a_teacher(root: Path) -> None:
    """However many ranks wrote them: attempt 1 had two, attempt 2 one."""
    run = open_run(str(root / "run"))
    statement = certificate_of(run.uri)
    assert statement is not None
    for mark in committed(run.store):
        manifest = read_manifest(run.store, mark)
        with Reader(run.store, manifest) as reader:
            weights = {name: reader.read_full(name) for name in manifest.shapes}
        teacher = FoundTeacher(None, weights, mark.step)  # type: ignore[arg-type]  # the digest is of weights alone
        assert weights_digest(run.store, manifest) == teacher.identity().weights
        facts = statement.newest[f"commit of step {mark.step}, attempt {mark.attempt}"]
        assert facts["weights"] == teacher.identity().weights
        assert facts["weights"] in {subject.digest.sha256 for subject in statement.subject}


def test_an_export_names_the_certificate(run: str, tmp_path: Path) -> None:
    statement = certificate_of(run)
    assert statement is not None
    export_run(open_run(run), None, str(tmp_path / "model"))
    newest = committed(open_store(run))[0]
    weights = statement.newest[f"commit of step {newest.step}, attempt {newest.attempt}"]["weights"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert statement.digest in card
    assert str(weights) in card


def test_quick_reads_neither_weights_nor_shards(run: str) -> None:
    mark = committed(open_store(run))[0]
    (file, *_) = sorted(Path(run, mark.folder).glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(bytes(len(data)))
    quick = examine(run, certificate_of(run), quick=True)
    assert not quick.problems
    assert quick.bytes == sum(one.size for one in quick.files.values())
    file.write_bytes(data[:-1])
    assert {one.place for one in examine(run, certificate_of(run), quick=True).problems} == {str(file)}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        private, public = folder / f"{name}.pem", folder / f"{name}.public.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return folder


def test_a_signature_holds_for_its_key_and_its_bytes_alone(run: str, keys: Path, tmp_path: Path) -> None:
    mine, other = (read_public_key(keys / f"{name}.public.pem") for name in ("mine", "other"))
    statement, _ = certify(run, key=read_private_key(keys / "mine.pem"))
    assert certificate_of(run, mine) == statement == certificate_of(run)
    with pytest.raises(CertificateError):
        certificate_of(run, other)
    envelope = Path(run, ENVELOPE)
    kept = tmp_path / "kept.json"
    kept.write_bytes(envelope.read_bytes())
    assert given_certificate(kept, mine) == statement
    draw, data = random.Random(7), envelope.read_bytes()
    for _ in range(60):
        changed = bytearray(data)
        changed[draw.randrange(len(data) - 1)] ^= 1 << draw.randrange(7)
        envelope.write_bytes(changed)
        with suppress(CertificateError):
            assert certificate_of(run, mine) == statement  # the name of a key, or an unused bit of base64
    envelope.write_bytes(data)
    forged = Path(run, CERTIFICATE)
    forged.write_bytes(forged.read_bytes().replace(b'"name":"small"', b'"name":"smell"'))
    with pytest.raises(CertificateError):
        certificate_of(run, mine)


@pytest.mark.long
def test_without_a_certificate_hashes_of_commits_and_corpora_are_checked(root: Path, run: str) -> None:
    Path(run, CERTIFICATE).unlink()
    sound(run)
    mark = committed(open_store(run))[0]
    (file, *_) = sorted(Path(run, mark.folder).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    assert {problem.place for problem in verified(run).problems} == {str(file)}


def ended(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["runs", *arguments])


@pytest.mark.long
def test_the_commands(run: str, keys: Path) -> None:
    assert ended("certify", run, "--key", str(keys / "mine.pem")).exit_code == 0
    done = ended("verify", run, "--public-key", str(keys / "mine.public.pem"), "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert told["certificate"] == Statement.model_validate_json(Path(run, CERTIFICATE).read_bytes()).digest
    Path(run, "checkpoints/began.json").write_bytes(b"[]\n")
    done = ended("verify", run, "--json")
    assert done.exit_code == 1
    assert [one["place"] for one in json.loads(done.stdout)["problems"]] == [f"{run}/checkpoints/began.json"]
    assert isinstance(
        ended("verify", run, "--public-key", str(keys / "mine.pem")).exception, CertificateError
    )


@pytest.mark.long
@pytest.mark.cluster
def test_steps_are_trained_again_to_the_same_bits_and_a_made_up_log_is_not(run: str) -> None:
    draw = random.Random(3)
    again = retrain(open_run(run), 2, draw)
    assert again.stop - again.first >= 1
    assert not again.differences
    for segment in Path(run, "metrics/a000002").iterdir():
        segment.write_bytes(segment.read_bytes().replace(b'"grad_norm":0.', b'"grad_norm":1.'))
    assert retrain(open_run(run), 2, draw).differences
