"""A page of HTML as tests see it: its elements, which must nest, and its text."""

from html.parser import HTMLParser

VOID = ("meta", "br", "link", "input")


class Page(HTMLParser):
    """`elements`: names and attributes of all, in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def attributes(self, *names: str) -> list[str]:
        """The values of these attributes, wherever they are."""
        return [value or "" for _, found in self.elements for name, value in found.items() if name in names]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
