"""The base model of muP (Yang et al., 2022, arXiv 2203.03466): the narrower model from which a wider one is scaled."""

from typing import TypeVar

from pydantic import ValidationError

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig
from encoder_core.layers.sizes import Mup

_Model = TypeVar("_Model", bound=EncoderConfig)


def mup_base(model: _Model) -> _Model:
    """Return the configuration of the muP base of `model`; without `mup`, `model` itself.

    Raises:
        ModelError: the head has no norm that can carry muP's output multiplier, or the base's widths are not valid.
    """
    mup = model.mup
    if mup is None:
        return model
    if model.has_tied_decoder and not model.has_norm_before_decoder:
        raise ModelError(
            f"muP is not supported for {model.name}: its decoder is tied to the word embeddings, and its head has no "
            "norm before the decoder, which could carry muP's output multiplier",
            remedy="remove model.mup, or train a family whose head has a norm or whose decoder is not tied",
        )
    widths = {name: _narrowed_width(model, name, mup) for name in model.width_settings}
    if mup.feed_forward is not None:
        widths["feed_forward"] = mup.feed_forward
    try:
        base = type(model).model_validate(model.model_dump() | widths | {"hidden": mup.hidden, "mup": None})
    except ValidationError as error:
        raise ModelError(
            f"{model.name} cannot have a muP base of width {mup.hidden}: {error.errors()[0]['msg']}",
            remedy="set model.mup to the widths of a valid model",
        ) from error
    if base.projects_embeddings != model.projects_embeddings:
        raise ModelError(
            f"only one of the model (hidden {model.hidden}) and its muP base (hidden {mup.hidden}) projects the "
            f"embeddings of width {model.embedding_width}: they differ in more than their widths",
            remedy=f"set model.mup.hidden to a width other than {model.embedding_width}",
        )
    return base


def _narrowed_width(model: EncoderConfig, name: str, mup: Mup) -> int:
    """Return the base's value of the setting `name`, in proportion to the base's `hidden`.

    Raises:
        ModelError: the value would not be an integer.
    """
    own: int = getattr(model, name)
    whole, rest = divmod(own * mup.hidden, model.hidden)
    if not rest or (name == "feed_forward" and mup.feed_forward is not None):
        return whole
    head = model.hidden // model.heads
    raise ModelError(
        f"with model.mup.hidden {mup.hidden}, the base's {name} would be {own * mup.hidden / model.hidden:g}",
        remedy="set model.mup.feed_forward"
        if name == "feed_forward"
        else f"set model.mup.hidden to a multiple of {head}, the width of a head",
    )
