"""What mkdocs calls while it builds: keeps the pages from asking other hosts."""

from __future__ import annotations

from typing import Any

_SHIM = "https://unpkg.com/iframe-worker/shim"


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Takes the theme's one script of another host from the site itself."""
    return output.replace(_SHIM, "../" * page.url.count("/") + "assets/iframe-worker.js")


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """Does the same for the page that tells of a missing page."""
    return output_content.replace(_SHIM, "/assets/iframe-worker.js")
