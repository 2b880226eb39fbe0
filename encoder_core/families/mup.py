"""muP's base (Yang et al., 2022, arXiv 2203.03466): the narrower model from which a wider one is scaled."""

from typing import TypeVar

from pydantic import ValidationError

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig
from encoder_core.layers.sizes import Mup

_Model = TypeVar("_Model", bound=EncoderConfig)


def mup_base(model: _Model) -> _Model:
    """Return the base of `model`, as a model of its own; without `mup` the model itself.

    Raises:
        ModelError: the model's head has no place for muP's output multiplier, or no base has these widths.
    """
    mup = model.mup
    if mup is None:
        return model
    if model.has_tied_decoder and not model.has_norm_before_decoder:
        raise ModelError(
            f"muP is not defined for {model.name} whose decoder is the word embeddings: no norm of the head's own "
            "precedes the decoder, which could carry the output multiplier",
            remedy="leave model.mup out, or train a family whose head has a norm, or whose decoder is not tied",
        )
    widths = {name: _narrowed_width(model, name, mup) for name in model.width_settings}
    if mup.feed_forward is not None:
        widths["feed_forward"] = mup.feed_forward
    try:
        base = type(model).model_validate(model.model_dump() | widths | {"hidden": mup.hidden, "mup": None})
    except ValidationError as error:
        raise ModelError(
            f"no {model.name} is the base of width {mup.hidden}: {error.errors()[0]['msg']}",
            remedy="set model.mup to the widths of a model that can be trained",
        ) from error
    if base.projects_embeddings != model.projects_embeddings:
        raise ModelError(
            f"only one of the model (hidden {model.hidden}) and its muP base (hidden {mup.hidden}) projects the "
            f"embeddings of width {model.embedding_width}: they differ in more than their widths",
            remedy=f"choose a base, model.mup.hidden, that is not {model.embedding_width} wide",
        )
    return base


def _narrowed_width(model: EncoderConfig, name: str, mup: Mup) -> int:
    """Return a width of the base in proportion to its `hidden`.

    Raises:
        ModelError: it would not be whole.
    """
    own: int = getattr(model, name)
    whole, rest = divmod(own * mup.hidden, model.hidden)
    if not rest or (name == "feed_forward" and mup.feed_forward is not None):
        return whole
    head = model.hidden // model.heads
    raise ModelError(
        f"model.mup.hidden is {mup.hidden}, where {name} would be {own * mup.hidden / model.hidden:g}",
        remedy="state model.mup.feed_forward"
        if name == "feed_forward"
        else f"choose a multiple of {head}: heads of the base are as wide as the model's",
    )
