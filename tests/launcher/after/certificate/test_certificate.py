"""The certificate of a run: each changed byte is found and named, and what a run may do afterwards is no damage."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from checkpoints.attempt import Attempt
from checkpoints.layout import CheckpointName, encode_manifest
from checkpoints.listing import list_committed, read_manifest
from data_service.errors import UserError
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher.after.certificate.chain import (
    CERTIFICATE_KEY,
    DIGEST_CHUNK_BYTES,
    SIGNATURE_KEY,
    decode_certificate,
    encode_certificate,
    extend_chain,
    read_key,
)
from launcher.after.certificate.examine import CertificateCheck, certify, compare_with_certificate, read_certificate
from launcher.after.export.export import export_run
from launcher.app.cli.main import app
from launcher.errors import CertificateError
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.small_runs import new_run, operate, with_torch

SHORT = (
    "phases=[{steps: 6, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 2}, keep_last: 2}",
    "evaluation={every: {steps: 3}, samples: 12}",
    "logging={flush_seconds: 0.01, tensorboard: true}",
)


REWRITTEN = (
    "attempts/deaths.json",
    "attempts/stop.json",
    "trackers/wandb.state.json",
    "tables/0123.json",
    "microbatch/0123.json",
    "baselines.json",
)
"""What commands write again as a run goes on."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certified run of two attempts."""
    root = tmp_path_factory.mktemp("certified")
    small_runs.prepare_corpus(root)
    run = new_run(root, "run", *SHORT)
    finish(run, 2, stop_at=3)
    finish(run, 1)
    Attempt(open_store(run), 2).record_end(time.time())
    statement, found = certify(run)
    assert statement is not None, found.problems
    return root


@pytest.fixture
def run(root: Path, tmp_path: Path) -> str:
    """A copy of the run, which a test may change. It reads the same corpus."""
    shutil.copytree(root / "run", tmp_path / "run")
    return str(tmp_path / "run")


def verified(run: str) -> CertificateCheck:
    return compare_with_certificate(run, read_certificate(run))


def sound(run: str) -> CertificateCheck:
    found = verified(run)
    assert not found.problems
    return found


def named(run: str) -> str:
    """What verification says, whether it ends in an error or with a list."""
    try:
        return "\n".join(map(" ".join, verified(run).problems))
    except UserError as error:
        return error.problem


def rewritten(key: str) -> bool:
    return key.startswith((*REWRITTEN, "tensorboard/", "cache/")) or key.endswith(".heartbeat")


def changed_bytes(run: str, count: int, draw: random.Random) -> Iterator[Path]:
    """Turn one bit over in a certified file of the run, drawn at random; yield the file; turn it back."""
    files = [path for path in sorted(Path(run).rglob("*")) if path.is_file() and path.stat().st_size]
    certified = [path for path in files if not rewritten(path.relative_to(run).as_posix())]
    for _ in range(count):
        path = draw.choice(certified)
        before = path.read_bytes()
        after, at = bytearray(before), draw.randrange(len(before))
        after[at] ^= 1 << draw.randrange(8)
        path.write_bytes(after)
        yield path
        path.write_bytes(before)


def test_a_change_is_named_by_its_range(run: str) -> None:
    mark = list_committed(open_store(run))[0]
    (file, *_) = sorted(Path(run, mark.folder).glob("*.safetensors"))
    file.write_bytes(bytes(2 * DIGEST_CHUNK_BYTES + 5))
    certificate, _ = certify(shutil.copytree(run, f"{run}-other", ignore=shutil.ignore_patterns(CERTIFICATE_KEY)))
    with file.open("r+b") as data:
        data.seek(DIGEST_CHUNK_BYTES)
        data.write(b"\1")
    assert compare_with_certificate(run, certificate).problems == [
        (str(file), f"bytes {DIGEST_CHUNK_BYTES} to {2 * DIGEST_CHUNK_BYTES}: changed")
    ]
    file.unlink()
    assert {place for place, _ in compare_with_certificate(run, certificate).problems} == {str(file)}


@pytest.mark.parametrize(("changes", "seed"), [(5, 0), pytest.param(800, 1, marks=pytest.mark.long)])
def test_a_byte_that_is_changed_anywhere_is_named(root: Path, changes: int, seed: int) -> None:
    run = str(root / "run")
    for path in changed_bytes(run, changes, random.Random(seed)):
        segment = path.suffix == ".jsonl"
        place = f"{path.parent.name}/ segment {int(path.stem)}:" if segment else path.name
        assert place in named(run), path
    sound(run)


@pytest.mark.long
def test_a_run_that_goes_on_makes_the_certificate_older_and_not_wrong(root: Path) -> None:
    run = new_run(root, "longer", *SHORT)
    finish(run, 1, stop_at=3)
    first, _ = certify(run)
    assert first is not None
    finish(run, 1)
    shutil.rmtree(Path(run, list_committed(open_store(run))[-1].folder))  # as retention does
    found = sound(run)
    assert any("have grown since" in note for note in found.notes)
    assert any("no longer kept" in note for note in found.notes)
    second, found = certify(run)
    assert second is not None, found.problems
    assert second.chain[: len(first.chain)] == first.chain
    assert all(second.newest_digests[mark.manifest_key] for mark in list_committed(open_store(run)))
    assert [what for what, digests in second.newest_digests.items() if "manifest.json" in what and not digests]
    again, found = certify(run)
    assert again == second
    assert not found.notes


def test_what_commands_write_again_is_no_damage(run: str) -> None:
    """Nor is it under a certificate that has it, as earlier ones of 0.3 do."""
    for content in (b"1", b"2"):
        for key in REWRITTEN:
            open_store(run).put(key, content)
        sound(run)
        assert certify(run)[0] is not None
    former = read_certificate(run)
    assert former is not None
    earlier = extend_chain(former, dict(former.newest_digests) | dict.fromkeys(REWRITTEN, ("0" * 64,)))
    open_store(run).put(CERTIFICATE_KEY, encode_certificate(earlier))
    sound(run)
    assert certify(run)[0] is not None


def test_where_torch_was_changed_is_noted(run: str) -> None:
    store = open_store(run)
    assert not any("torch" in note for note in sound(run).notes)
    newest, *_, oldest = list_committed(store)
    with_torch(store, oldest, "2.11.0")
    (note,) = (note for note in compare_with_certificate(run, None).notes if "torch" in note)
    assert f"step {oldest.step}:" in note
    assert "torch 2.11.0 " in note
    store.put(newest.manifest_key, b"{")  # what is damaged is named by its digest, not by this
    assert any(newest.manifest_key in place for place, _ in verified(run).problems)


@pytest.mark.parametrize("seed", range(6))
def test_damage_of_one_manifest_hides_no_change_of_torch(run: str, seed: int) -> None:
    store, draw = open_store(run), random.Random(seed)
    newest = read_manifest(store, list_committed(store)[0])
    readable = [(mark.step, newest.versions["torch"]) for mark in reversed(list_committed(store))]
    for step in range(100, 108):
        name = CheckpointName(newest.attempt, step)
        files = [file.model_copy(update={"key": name.file_key(rank)}) for rank, file in enumerate(newest.files)]
        lineage = (*newest.lineage[:-1], newest.lineage[-1].model_copy(update={"stop": step}))
        manifest = newest.model_copy(update={"step": step, "files": tuple(files), "lineage": lineage})
        store.put(manifest.name.manifest_key, encode_manifest(manifest))
        release = draw.choice(["2.11.0", "2.12.0"])
        with_torch(store, manifest.name, release)
        if draw.random() < 0.4:
            whole = store.get(manifest.name.manifest_key)
            store.put(manifest.name.manifest_key, whole[: draw.randrange(len(whole))])
        else:
            readable.append((step, release))
    changes = [step for (step, before), (_, after) in pairwise(readable) if before != after]
    notes = [note for note in compare_with_certificate(run, None).notes if "torch" in note]
    assert [int(note.split("step ")[1].split(":")[0]) for note in notes] == changes


def test_damage_of_one_pack_hides_no_other_log(run: str) -> None:
    store, draw = LocalStore(Path(run)), random.Random(3)
    while pack_once(store, 1, ended=True, most_segments=3):
        pass
    sound(run)
    certificate = read_certificate(run)
    assert certificate is not None
    packs = [entry.key for entry in store.list() if entry.key.endswith(".parquet")]
    assert packs
    for key in packs:
        before = store.get(key)
        store.put(key, before[: draw.randrange(len(before))])
        other = draw.choice([entry.key for entry in store.list("metrics/a000002/") if entry.key.endswith(".jsonl")])
        kept = store.get(other)
        store.put(other, kept + b"\n")
        places = [place for place, _ in compare_with_certificate(run, certificate).problems]
        logs = {f"{name.rpartition('/')[0]}/" for name in (key, other)}
        assert sorted(places) == sorted(f"{run}/{name}" for name in logs | ({key} & set(certificate.newest_digests)))
        store.put(other, kept)
        store.put(key, before)


@pytest.mark.long
def test_segments_may_be_packed(run: str) -> None:
    store = LocalStore(Path(run))
    while pack_once(store, 1, ended=True, most_segments=3):
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
    before = read_certificate(run)
    statement, found = certify(run)
    assert statement is not None
    assert before is not None
    assert any("recipe.yaml" in note for note in found.notes)
    assert statement.newest_digests["recipe.yaml"] != before.newest_digests["recipe.yaml"]
    sound(run)


def test_what_must_not_change_is_not_certified_again(run: str) -> None:
    (segment, *_) = sorted(Path(run, "metrics/a000002").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b'"loss":', b'"lass":', 1))
    before = Path(run, CERTIFICATE_KEY).read_bytes()
    statement, found = certify(run)
    assert statement is None
    assert found.problems == [(f"{segment.parent}/", f"segment {int(segment.stem)}: changed")]
    assert Path(run, CERTIFICATE_KEY).read_bytes() == before


def test_an_export_names_the_certificate(run: str, tmp_path: Path) -> None:
    statement = read_certificate(run)
    assert statement is not None
    export_run(open_run(run), None, str(tmp_path / "model"))
    assert statement.digest in (tmp_path / "model" / "README.md").read_text()
    Path(run, CERTIFICATE_KEY).unlink()
    export_run(open_run(run), None, str(tmp_path / "other"))
    assert statement.digest not in (tmp_path / "other" / "README.md").read_text()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        private, public = folder / f"{name}.pem", folder / f"{name}.public.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return folder


def test_a_signature_holds_for_its_key_and_its_bytes_alone(run: str, keys: Path) -> None:
    mine, other = (read_key(keys / f"{name}.public.pem", "public") for name in ("mine", "other"))
    written, _ = certify(run, read_key(keys / "mine.pem", "private"))
    assert read_certificate(run, mine) == written == read_certificate(run)
    options = ("-in", f"{run}/{CERTIFICATE_KEY}", "-sigfile", f"{run}/{SIGNATURE_KEY}")
    check = (
        "openssl",
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        keys / "mine.public.pem",
        "-rawin",
        *options,
    )
    subprocess.run(check, check=True)
    with pytest.raises(CertificateError):
        read_certificate(run, other)
    draw = random.Random(7)
    for path in (Path(run, SIGNATURE_KEY), Path(run, CERTIFICATE_KEY)) * 20:
        before = path.read_bytes()
        changed = bytearray(before)
        changed[draw.randrange(len(before))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(CertificateError):
            read_certificate(run, mine)
        path.write_bytes(before)
    certify(run)
    with pytest.raises(CertificateError):  # the new certificate is not signed
        read_certificate(run, mine)


def test_a_certificate_that_was_changed_is_refused_without_a_key(run: str) -> None:
    path, draw = Path(run, CERTIFICATE_KEY), random.Random(8)
    before = path.read_bytes()
    for _ in range(60):
        changed = bytearray(before)
        changed[draw.randrange(len(before))] ^= 1 << draw.randrange(8)
        with pytest.raises(CertificateError):
            decode_certificate(bytes(changed), "here")


@pytest.mark.parametrize(
    ("data", "version"),
    [(b'{"_type":"https://in-toto.io/Statement/v1","predicate":{}}\n', "0.2.0"), (b'{"format":3}', "newer")],
)
def test_a_certificate_of_another_version_is_named(data: bytes, version: str) -> None:
    with pytest.raises(CertificateError) as caught:
        decode_certificate(data, "here")
    assert version in f"{caught.value.problem} {caught.value.remedy}"


def ended(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["runs", *arguments])


@pytest.mark.long
def test_the_commands(run: str, keys: Path) -> None:
    assert ended("certify", run, "--key", str(keys / "mine.pem")).exit_code == 0
    done = ended("verify", run, "--public-key", str(keys / "mine.public.pem"), "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert told["certificate"] == decode_certificate(Path(run, CERTIFICATE_KEY).read_bytes(), "here").digest
    Path(run, "checkpoints/began.json").write_bytes(b"[]\n")
    done = ended("verify", run, "--json")
    assert done.exit_code == 1
    assert [one["place"] for one in json.loads(done.stdout)["problems"]] == [f"{run}/checkpoints/began.json"]
    assert ended("certify", run).exit_code == 1
    assert isinstance(ended("verify", run, "--public-key", str(keys / "mine.pem")).exception, CertificateError)
    Path(run, CERTIFICATE_KEY).unlink()
    assert ended("verify", run).exit_code == 1
