"""Masked language modelling, as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.terms.term import DefaultWeightTerm, HeadConfig, Refusal, Setting, refuse_decoder_family


class TokenPrediction(HeadConfig):
    """A term that predicts the original ids of hidden tokens, with the masked language model's head."""

    exported = "mlm"
    reads = "targets"
    predicts_ids = True

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse families without masks, families with a decoder, and rows without masks."""
        rows = setting.rows
        yield from refuse_decoder_family(self.name, setting)
        if setting.model.permutes:
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by {self.name}: it predicts tokens in a "
                "random order, without masks",
                f"use plm for {setting.model.family}, and {self.name} for every other family",
            )
        elif rows is not None and rows.lanes:
            yield Refusal(
                ("input", "packing"),
                "rows in lanes are for permuted language modelling, but the objective is another",
                "set objective to plm, or input.packing to full_sentences",
            )
        elif rows is not None and rows.texts:
            yield Refusal(
                ("input", "packing"),
                f"{rows.packing} rows hold whole texts to be compared, but the objective predicts tokens",
                "set objective to contrastive, or input.packing to full_sentences",
            )


class MlmConfig(DefaultWeightTerm, TokenPrediction):
    """Masked language modelling (BERT, section 3.1). Which tokens are masked is a setting of the data service."""

    name = "mlm"
