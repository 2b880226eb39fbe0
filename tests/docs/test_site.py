"""The site that `infra/build_site` makes: it builds without a warning, no link is broken, no page is left out."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import maskfleet

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra/build_site"
BUILD = re.compile(r"^\.venv/bin/python (-m sphinx .*) -d build/doctrees \. build/site$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, by the line of the script."""
    match = BUILD.search(SCRIPT.read_text("utf-8"))
    assert match is not None
    assert "--fail-on-warning" in match[1]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, *match[1].split(), "-d", str(folder / "doctrees"), ".", str(folder / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, str]:
    """All pages but the theme's own parts, as HTML."""
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path: path.read_text("utf-8") for path in paths}


@pytest.mark.long
def test_every_link_of_every_page_leads_somewhere(pages: dict[Path, str]) -> None:
    anchors = {path: set(map(unescape, re.findall(r'\bid="([^"]+)"', page))) for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for link in set(map(unescape, re.findall(r'<[^<>]*?\s(?:href|src)="([^"]*)"', page))):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = not parts.fragment or unquote(parts.fragment) in anchors.get(target, set())
            if not target.is_file() or not known:
                broken.append((path.name, link))
    assert broken == []


@pytest.mark.long
def test_every_markdown_file_is_a_page(pages: dict[Path, str], site: Path) -> None:
    listing = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    made = {str(path.relative_to(site).with_suffix(".md")) for path in pages}
    assert {name for name in listing.stdout.split() if (ROOT / name).exists()} <= made


@pytest.mark.long
def test_the_reference_has_every_public_name(pages: dict[Path, str], site: Path) -> None:
    reference = pages[site / "infra/site/reference.html"]
    described = set(re.findall(r'<dt [^>]*id="([^"]+)"', reference))
    assert {f"maskfleet.{name}" for name in maskfleet.__all__} <= described
    assert "maskfleet.Run.sample" in described
