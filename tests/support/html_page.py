"""What a test asks of an HTML page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A page that is read.

    Attributes:
        open: Tags that are not closed. loads: Every attribute that could load something.
        words: Texts. rows: Texts of cells, by row of a table.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str | None] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.loads += [value for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
