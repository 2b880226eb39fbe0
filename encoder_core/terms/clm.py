"""Next-token prediction, as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.families.catalogue import uses_mask_decoder
from encoder_core.terms.term import HeadConfig, Refusal, Setting, refuse_decoder_family

_COMBINABLE_TERMS = ("clm", "mlm")


class ClmConfig(HeadConfig):
    """Next-token prediction under causal attention, by the head that predicts hidden tokens, too.

    It is trained on causal rows, on which no other term has targets. Beside mlm, each phase of a run trains one of the
    two ("Should We Still Pretrain Encoders with Masked Language Modeling?", arXiv 2507.00994: CLM, then MLM).
    """

    name = "clm"
    exported = "mlm"
    reads = "all"
    causal = True
    predicts_ids = True

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse other terms than mlm, layers that see later tokens in any case, and rows without running text."""
        others = [name for name in setting.terms if name not in _COMBINABLE_TERMS]
        if others:
            yield Refusal(
                ("objective",),
                f"clm cannot be combined with {others[0]}: its rows are causal, and {others[0]} needs states that see "
                "the whole row",
                f"leave {others[0]} out, and train it in a run that starts from this one",
            )
        yield from refuse_decoder_family(self.name, setting)
        if setting.model.permutes:
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by clm: its two streams see tokens in a "
                "random order",
                f"use plm for {setting.model.family}, and clm for another family",
            )
        if setting.model.has_convolution:
            yield Refusal(
                ("model", "convolution"),
                "the convolution shows each token the next one, which clm predicts",
                "set model.convolution to null, or train mlm",
            )
        if uses_mask_decoder(setting.model):
            yield Refusal(
                ("model", "mask_decoder"),
                "clm hides no token, and DeBERTa's enhanced mask decoder looks again at the places of hidden tokens",
                "set model.mask_decoder to plain, or train mlm",
            )
        if setting.rows is not None and (setting.rows.lanes or setting.rows.texts):
            yield Refusal(
                ("input", "packing"),
                f"{setting.rows.packing} rows are not rows of running text, whose next token is predicted",
                "set input.packing to full_sentences",
            )
