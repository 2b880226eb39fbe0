"""The measuring programs run and say what they found; how fast anything is, is not tested."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import core_share
import gpu_cuts
import gpu_pairs
import gpu_step
import ingest
import masking
import numpy as np
import plan
import program
import pytest
import store_pairs
from cpu import tree_seconds
from data_peer import masked_by_numpy, need_peer
from program import BenchError
from synthetic import SPECIAL

from data_service.corpus.corpus import open_corpus
from launcher.runtime.capacity.workload import Shape
from tests.support.stores.s3 import S3Server


def quiet(_: str) -> None: ...


@pytest.mark.long
def test_ours_masks_faster_than_transformers_collator_and_the_report_names_both() -> None:
    result = masking.bench_masking(length=128, rounds=1, progress=quiet)
    assert result.ratio > 1
    text = masking.render(result)
    assert "by whole_word" in text
    assert "collator" in text


@pytest.mark.long
def test_a_plan_has_the_samples_that_its_tokens_make() -> None:
    cost = plan.bench_plan(tokens=10**9, real_blocks=1, progress=quiet)
    assert cost.samples == pytest.approx(10**9 / 487, rel=0.01)
    assert "counting pass, once a corpus" in plan.render(cost)


@pytest.mark.long
def test_a_build_of_many_documents_is_measured(tmp_path: Path) -> None:
    (cost,) = ingest.bench_build([300], "a file each", 1, str(tmp_path), quiet)
    assert cost.documents == 300
    assert cost.cpu > 0
    assert cost.driver > 1 << 20
    assert len(list(tmp_path.glob("300/*/*.txt"))) == 300
    (corpus,) = (open_corpus(str(path.parent)) for path in tmp_path.glob("*/manifest.json"))
    assert corpus.manifest.counts["documents_read"] == 300
    assert "300" in ingest.render([cost])


@pytest.mark.long
def test_stores_are_measured_in_pairs(s3: S3Server) -> None:
    pytest.importorskip("obstore", reason="needs maskfleet[clouds]")
    bucket = s3.new_bucket()
    found = store_pairs.bench_stores(f"s3://{bucket}", megabytes=18, pairs=2, progress=quiet)
    assert {what: len(pairs) for what, pairs in found.pairs.items()} == {
        "write": 2,
        "read": 2,
        "short reads": 2,
    }
    assert all(one.wall > 0 for pairs in found.pairs.values() for pair in pairs for one in pair)
    assert "short reads" in store_pairs.render(found)
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


def test_the_peers_masks_are_berts() -> None:
    rows = [{"tokens": np.full(512, 99, np.uint16)} for _ in range(200)]
    made = masked_by_numpy(rows)
    tokens, labels = made["input_ids"].numpy(), made["labels"].numpy()
    chosen = labels != -100
    assert not chosen[:, [0, -1]].any()
    assert (labels[chosen] == 99).all()
    assert chosen[:, 1:-1].mean() == pytest.approx(0.15, abs=0.01)
    assert (tokens[chosen] == SPECIAL.mask).mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens[chosen] == 99).mean() == pytest.approx(0.1, abs=0.02)
    assert (tokens[~chosen] == 99).all()


def test_cpu_time_counts_this_process() -> None:
    before = tree_seconds()
    sum(range(3_000_000))
    assert tree_seconds() > before


@pytest.mark.skipif(find_spec("streaming") is not None, reason="the peer is installed")
def test_a_missing_peer_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(BenchError, match="MosaicML") as raised:
        need_peer()
    assert "mosaicml-streaming" in raised.value.remedy


def test_a_program_ends_like_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(workers: int = 1) -> None:
        raise BenchError(f"{workers} workers are too few", remedy="give more")

    monkeypatch.setattr(sys, "argv", ["main", "--workers", "3"])
    with pytest.raises(SystemExit) as ended:
        program.run(main)
    assert ended.value.code == 2
    assert re.fullmatch(r"error: .*\b3 workers\b.*\nremedy: .*\n", capsys.readouterr().err)


@pytest.mark.long
def test_a_share_of_the_core_is_below_one_and_above_nothing() -> None:
    shape = Shape(1, 16, 3)
    config = core_share.configurations()["bert"].model_copy(
        update={"layers": 1, "hidden": 32, "heads": 2, "feed_forward": 64, "vocab": 100}
    )
    found = core_share.measured("bert", config, shape, rounds=1)
    assert 0 < found.share < 1


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_cut_of_every_kernel_computes_the_same() -> None:
    """Without a GPU, in the interpreter; nothing is timed there."""
    found = [*gpu_cuts.measured("relative-keys", "cpu", lambda number: True)]
    assert {one.kernel for one in found} == {"forward", "queries", "keys"}
    assert [one for one in found if one.failure or one.off > 1e-5] == []
    assert gpu_cuts.render(found).count("in use") == 3


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_of_two_trees_are_timed_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """The other tree is this one."""
    gpu_pairs.main(gpu_pairs.ROOT, ["relative-keys"], 20, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["relative-keys, new", "relative-keys, earlier"]


@pytest.mark.long
def test_a_step_is_taken_apart(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_step.main("roberta-base", None, None, True)
    first, *kernels = capsys.readouterr().out.splitlines()[-41:]
    assert "tokens/s" in first
    assert kernels
    times = [float(line.split()[0]) for line in kernels]
    assert times == sorted(times, reverse=True)
