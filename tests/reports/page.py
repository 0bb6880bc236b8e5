"""A page as tests look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "input", "br", "line", "circle", "rect", "path", "polyline", "polygon"}
OPEN = {"meta", "link", "img", "input", "br"}


@dataclass
class Node:
    """An element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    inside: list[Node] = field(default_factory=list)

    def all(self, tag: str = "", css: str = "") -> list[Node]:
        """Elements below it, by tag and class."""
        found = []
        for node in self.inside:
            if tag in ("", node.tag) and (not css or css in node.attributes.get("class", "").split()):
                found.append(node)
            found += node.all(tag, css)
        return found

    @property
    def words(self) -> str:
        """All its text."""
        return (self.text + " ".join(n.words for n in self.inside)).strip()


class Page(HTMLParser):
    """The tree of a page; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.root = Node("", {})
        self._open = [self.root]
        self.feed(self.source)
        self.close()
        assert self._open == [self.root], f"not closed: {[n.tag for n in self._open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {k: v or "" for k, v in attrs})
        self._open[-1].inside.append(node)
        if tag not in OPEN:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].inside.append(Node(tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def section(self, key: str) -> Node | None:
        """A section by its key."""
        return next((s for s in self.root.all("section") if s.attributes["id"] == key), None)

    @property
    def sections(self) -> list[str]:
        """The keys of the sections."""
        return [s.attributes["id"] for s in self.root.all("section")]


def check(page: Page) -> Page:
    """What holds of every report: nothing from outside, everything named, links that lead somewhere."""
    root = page.root
    for node in root.all():
        for key in ("src", "href", "xlink:href", "action"):
            value = node.attributes.get(key, "#")
            assert value.startswith(("#", "data:")), f"<{node.tag} {key}={value[:60]}> is fetched from elsewhere"
    assert "url(" not in page.source
    assert "@import" not in page.source
    ids = [n.attributes["id"] for n in root.all() if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    for link in root.all("a"):
        assert link.attributes["href"][1:] in ids
    for chart in root.all("svg", "chart"):
        assert chart.attributes["role"] == "img"
        assert len(chart.attributes["aria-label"]) > 5
        assert "nan" not in " ".join(
            v for n in chart.all() for k, v in n.attributes.items() if k in ("points", "x", "y", "d")
        )
    for image in root.all("img"):
        assert image.attributes["alt"]
    for table in root.all("table", "sortable"):
        width = len(table.all("thead")[0].all("th"))
        assert all(len(row.inside) == width for row in table.all("tbody")[0].all("tr"))
    assert root.all("h1")[0].words
    assert page.sections[0] == "headline"
    assert page.sections[-1] == "repeat"
    return page
