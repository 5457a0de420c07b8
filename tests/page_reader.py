"""A page as a test looks at it: what is open, what would be fetched, what may run, and what it shows."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "link", "wbr", "input")
# Attributes by which an element makes a browser ask for something.
FETCHING = ("src", "srcset", "href", "xlink:href", "data", "poster", "action", "formaction", "background")


class SeenPage(HTMLParser):
    """Of a page's text:

    Attributes:
        open: tags that are left open.
        ids: every id.
        fetched: whatever would be asked for; links within the page and data: are not.
        scripts: the source of each.
        policy: the content security policy.
        spots: what the plots say where they are pointed at.
        tables: each as its rows of cells, the headings first.
        titles: the tables' captions.
        links: ids that are linked to.
        shown: all text but scripts and styles.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.spots: list[str] = []
        self.links: list[str] = []
        self.titles: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.policy, self.shown, self.num_pictures = "", "", 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = {name: value or "" for name, value in attrs}
        if tag not in VOID:
            self.open.append(tag)
        self.num_pictures += tag == "svg"
        self.ids += [result["id"]] if "id" in result else []
        self.links += [result["href"][1:]] if tag == "a" and result["href"].startswith("#") else []
        refers = [result[name] for name in FETCHING if name in result]
        self.fetched += [link for link in refers if not link.startswith(("#", "data:"))]
        self.fetched += re.findall(r"url\((?!#)[^)]*\)", result.get("style", ""))
        self.fetched += [f"{tag} {name}" for name in result if name.startswith("on")]
        if result.get("http-equiv") == "Content-Security-Policy":
            self.policy = result["content"]
        match tag:
            case "script":
                self.scripts.append("")
            case "title" if "svg" in self.open:
                self.spots.append("")
            case "figcaption":
                self.titles.append("")
            case "table":
                self.tables.append([])
            case "tr":
                self.tables[-1].append([])
            case "th" | "td":
                self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts[-1] += data
        elif "style" in self.open:
            self.fetched += re.findall(r"@import.*|url\((?!#)[^)]*\)|https?:[^\s]*", data)
        else:
            self.shown += data
            if "td" in self.open or "th" in self.open:
                self.tables[-1][-1][-1] += data
            elif "figcaption" in self.open:
                self.titles[-1] += data
            elif self.open[-1:] == ["title"] and "svg" in self.open:
                self.spots[-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def check(self) -> None:
        """It is whole, asks for nothing, and runs nothing but what its own policy names."""
        assert self.open == [] and self.fetched == [] and len(self.ids) == len(set(self.ids))
        assert set(self.links) <= set(self.ids)
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in self.scripts]
        allowed = dict(part.split(" ", 1) for part in self.policy.split("; "))
        assert allowed["default-src"] == "'none'" and allowed["img-src"] == "data:"
        assert allowed["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests) and len(digests) == 2


def page_at(path: Path) -> SeenPage:
    """A page, read as `SeenPage` has it and checked."""
    page = SeenPage(path.read_text(encoding="utf-8"))
    page.check()
    return page
