# SPDX-License-Identifier: Apache-2.0
"""What the docs site needs beyond the files of this folder. Used by mkdocs.yml.

README and its siblings are written for the top of the repository; here they become pages of the site. Links that
are right on GitHub stay right on the site: to a page where there is one, to the file on GitHub elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}

_LINK = re.compile(r"(?<=\]\()(?!#|[a-z]+:)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that come from the top of the repository."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Make links that lead out of docs/ lead to a page of the site or to GitHub."""
    source = {target: source for source, target in ROOT_PAGES.items()}.get(page.file.src_uri)
    home = posixpath.dirname(source if source is not None else f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda link: _target(link[1], home, here, f"{config.repo_url}/blob/main"), markdown)


def _target(link: str, home: str, here: str, github: str) -> str:
    """Where `link`, written in a file of the folder `home`, leads from a page in the folder `here` of the site."""
    path = posixpath.normpath(posixpath.join(home, link))
    if path in ROOT_PAGES:
        return posixpath.relpath(ROOT_PAGES[path], here or ".")
    if path.startswith("docs/"):
        return posixpath.relpath(path.removeprefix("docs/"), here or ".")
    if (ROOT / path).exists():
        return f"{github}/{path}"
    return link  # mkdocs warns about it
