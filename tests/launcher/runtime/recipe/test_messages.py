"""What a mistake's message keeps of the message of a check, and of pydantic's."""

import json
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator, model_validator

from encoder_core.families.catalogue import FAMILIES
from launcher.app.cli.options import validate_options
from launcher.errors import OptionError, RecipeError
from launcher.runtime.recipe.document import RecipeDocument, validate

NAMES = st.sampled_from([family.name for family in FAMILIES] + ["DeepSpeed", "Ray", "NCCL", "ONNX", "JSON", "muP"])
WORDS = NAMES | st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,8}", fullmatch=True)


class Checked(BaseModel):
    message: str = ""
    count: int = 1
    together: str | dict[str, str] = ""

    @field_validator("message")
    @classmethod
    def _refuse(cls, message: str) -> str:
        raise ValueError(message)

    @field_validator("together")
    @classmethod
    def _refuse_settings(cls, settings: dict[str, str] | str) -> str:
        if isinstance(settings, dict):
            raise ValueError(settings["why"])
        return settings

    @model_validator(mode="after")
    def _refuse_together(self) -> Self:
        raise ValueError(self.together)


@given(word=WORDS, rest=WORDS)
def test_a_message_of_a_check_is_shown_as_it_is(word: str, rest: str) -> None:
    message = f"{word} {rest}"
    with pytest.raises(RecipeError) as refused:
        validate(Checked, RecipeDocument({"message": message}, "recipe.yaml", {}))
    assert refused.value.problem == f"recipe.yaml: message = {json.dumps(message)}: {message}"
    with pytest.raises(OptionError) as wrong:
        validate_options(Checked, message=message)
    assert wrong.value.problem == f"--message {message}: {message}"
    with pytest.raises(OptionError) as several:
        validate_options(Checked, together=message)
    assert several.value.problem == message
    with pytest.raises(OptionError) as settings:
        validate_options(Checked, together={"why": message})
    assert settings.value.problem == f"--together: {message}"


@given(count=st.text(min_size=1).filter(lambda text: not text.strip().lstrip("+-").replace("_", "").isdigit()))
def test_a_message_of_pydantic_goes_on_in_a_sentence(count: str) -> None:
    with pytest.raises(RecipeError) as refused:
        validate(Checked, RecipeDocument({"count": count}, "recipe.yaml", {}))
    assert refused.value.problem.removeprefix(f"recipe.yaml: count = {json.dumps(count)}: ").startswith("input ")
    with pytest.raises(OptionError) as wrong:
        validate_options(Checked, count=count)
    assert wrong.value.problem.removeprefix(f"--count {count}: ").startswith("input ")
