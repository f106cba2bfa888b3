"""Links in Markdown files lead somewhere, and no placeholder is left in them."""
import re

import pytest
from conftest import ROOT

PAGES = [page for folder in (".", "baselines") for page in (ROOT / folder).glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    headings = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", text, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if not target.startswith("http"):
            assert (page.parent / path).exists() if path else anchor in headings, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_placeholder_is_left(page):
    assert not re.search(r"@\w+@", page.read_text())
