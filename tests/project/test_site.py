"""What `make docs` would refuse: a page that loads something from elsewhere."""

from __future__ import annotations

import pytest

from tools.site.offline import loads

AWAY = "https://cdn.example.org/x"


@pytest.mark.parametrize(
    "text",
    [
        f'<script src="{AWAY}"></script>',
        '<script src="//cdn.example.org/x"></script>',
        f'<link rel="stylesheet" href="{AWAY}">',
        f'<link rel="preconnect" href="{AWAY}">',
        f'<img alt="" src="{AWAY}">',
        f'<a href="{AWAY}" data-md-component="source">fastagg</a>',
        f'<p style="background: url({AWAY})">',
        f"<style>@import '{AWAY}';</style>",
    ],
)
def test_what_a_page_loads(tmp_path, text):
    page = tmp_path / "page.html"
    page.write_text(f"<html><body>{text}</body></html>")
    assert [address.removeprefix("https:") for address in loads(page)] == ["//cdn.example.org/x"]


def test_a_style_loads(tmp_path):
    style = tmp_path / "site.css"
    style.write_text(f'a {{ background: url("{AWAY}") }} b {{ background: url(local.png) }}')
    assert loads(style) == [AWAY]


def test_links_load_nothing(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f'<a href="{AWAY}">x</a> <link rel="canonical" href="{AWAY}"> <script src="../x.js"></script>')
    assert loads(page) == []
