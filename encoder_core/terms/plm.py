"""Permuted language modelling (Yang et al. 2019, section 2.2), as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.terms.term import DefaultWeightTerm, ModuleConfig, Refusal, Setting


class PlmConfig(DefaultWeightTerm, ModuleConfig):
    """Permuted language modelling. The prediction order is a setting of the data service."""

    name = "plm"
    exported = "plm"

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse all but XLNet, on rows in lanes, with no other term."""
        others = [name for name in setting.terms if name != self.name]
        if others:
            yield Refusal(
                ("objective",),
                f"plm cannot be combined with {others[0]}: XLNet's two streams read rows in a random order with "
                "memory, without masks",
                "choose exactly one of mlm, plm and contrastive",
            )
        elif not setting.model.permutes:
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by plm: it has no query stream",
                "use plm for xlnet, and mlm for every other family",
            )
        elif setting.rows is not None and not setting.rows.lanes:
            yield Refusal(
                ("objective", "plm"),
                "permuted language modelling needs rows that continue from step to step, but "
                f"{setting.rows.packing} rows do not",
                "set input.packing to lanes",
            )
