"""Settings of which some are given."""

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Choice(BaseModel):
    """Optional fields of which some are given; those that are not stay out of the YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}
