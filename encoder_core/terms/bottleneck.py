"""What terms have in common that predict tokens through the vector of a row, so that it holds the row's text."""

from collections.abc import Iterator

from encoder_core.terms.term import HeadConfig, Refusal, Setting


class BottleneckConfig(HeadConfig):
    """A term that trains the vector of the row's first token beside mlm, by layers that are not exported."""

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, or with a generator."""
        others = [name for name in setting.terms if name != self.name]
        if "mlm" not in others:
            beside = f", not {others[0]}" if others else ""
            yield Refusal(
                ("objective",),
                f"{self.name} needs mlm{beside}: the vector is made of a text that mlm hides a part of",
                f"add objective.mlm, or leave {self.name} out",
            )
        if "rtd" in others:
            yield Refusal(
                ("objective", self.name),
                f"{self.name} cannot be combined with rtd: it would train the vectors of the generator, which is "
                "discarded after training",
                f"leave rtd or {self.name} out",
            )
