"""When layers are compiled, and what its name says."""

from pathlib import Path

import pytest
import torch

from encoder_core.families.roberta import RobertaConfig
from encoder_core.trials.trial_network import TrialSubject
from launcher.runtime.preflight.kernels import CompileSetting, choose_compilation, compiled_code_name

GPU = "a GPU, driver 1"
NETWORK = RobertaConfig(layers=2, hidden=16, heads=2, feed_forward=32, vocab=64)


@pytest.mark.parametrize(
    ("asked", "gpu", "unfit", "compiled"),
    [
        ("auto", None, "", False),
        ("auto", GPU, "", True),
        ("auto", GPU, "another Triton", False),
        (True, None, "another Triton", True),
        (True, GPU, "", True),
        (False, GPU, "", False),
    ],
)
def test_auto_compiles_on_gpus_where_triton_is(
    asked: CompileSetting, gpu: str | None, unfit: str, compiled: bool
) -> None:
    choice = choose_compilation(asked, gpu, unfit=unfit)
    assert choice.compiled == compiled
    assert choice.why
    if asked == "auto" and gpu is not None and unfit:
        assert choice.why == unfit


@pytest.mark.long
def test_the_name_is_of_all_that_compiled_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = TrialSubject((NETWORK,), torch.float32, torch.device("cpu"), 4, 32)
    name = compiled_code_name(subject, 1)
    assert compiled_code_name(subject, 1) == name
    wider = NETWORK.model_copy(update={"hidden": 32})
    others = [
        compiled_code_name(subject, 3),
        compiled_code_name(TrialSubject((wider,), torch.float32, torch.device("cpu"), 4, 32), 1),
        compiled_code_name(TrialSubject((NETWORK,), torch.bfloat16, torch.device("cpu"), 4, 32), 1),
        compiled_code_name(TrialSubject((NETWORK,), torch.float32, torch.device("cpu"), 8, 32), 1),
    ]
    monkeypatch.setattr("launcher.runtime.preflight.kernels._CPUINFO", Path("/nowhere"))
    others.append(compiled_code_name(subject, 1))
    assert len({name, *others}) == 6
