"""The rooms of each package, and who may import whom: downwards only, as the READMEs draw them."""

import pytest

from tests.support.layers import PACKAGES, arrows, circle, file_arrows

DRAWN = {
    "launcher": """
        maskfleet -> app observe runtime
        app -> after observe plan runtime
        after -> observe runtime
        plan -> runtime
        observe -> runtime
    """,
    "launcher.runtime": """
        cluster -> policies preflight rank recipe run
        rank -> capacity policies preflight recipe run
        preflight -> capacity recipe run
        run -> recipe
        capacity -> recipe
        recipe -> policies
    """,
    "launcher.observe": """
        sinks -> inspect
        watch -> inspect
    """,
    "launcher.plan": """
    """,
    "launcher.after": """
        evaluate -> embed export finetune tasks
        onnx -> diagnose embed export finetune
        diagnose -> finetune tasks
        embed -> export finetune tasks
        export -> certificate
        fill -> finetune
        finetune -> export tasks
        fill -> finetune
    """,
    "launcher.app": """
        cli -> schedulers
    """,
    "data_service": """
        prepare -> corpus ingest store tokenizers
        ingest -> corpus service store tokenizers
        service -> samples store stream
        stream -> corpus samples store tokenizers
        corpus -> store tokenizers
        samples -> store tokenizers
        tokenizers -> store
    """,
    "encoder_core": """
        trials -> families layers objectives optim
        train -> layers objectives optim
        objectives -> families heads layers optim
        heads -> kernels layers
        families -> layers
        optim -> kernels layers
        layers -> kernels
    """,
    "checkpoints": "",
    "tests.support": """
        faults -> data models ranks runs stores tasks
        tasks -> data models
        runs -> data models
        ranks -> models
        models -> data
    """,
}


def drawn(package: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in filter(str.strip, DRAWN[package].splitlines()):
        room, _, others = line.partition("->")
        found.setdefault(room.strip(), set()).update(others.split())
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_as_drawn_and_in_no_circle(package: str) -> None:
    assert arrows(package) == drawn(package)
    assert circle(arrows(package)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(file_arrows()) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "e": {"a"}}) == ["a", "b", "c", "e"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
