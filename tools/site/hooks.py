"""What MkDocs does not do by itself: formulas, notebooks, pages that lie outside of docs, and links between them."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ELSEWHERE = {  # pages made of files outside of docs
    "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md",
    "examples/flower.md": "examples/flower/README.md", "examples/nvflare.md": "examples/nvflare/README.md",
}  # fmt: skip
NUMBER = re.compile(r"(<td[^>]*>)([-+]?\d[^<]{0,15})(?=</td>)")  # of a table, with its unit: stays in one line
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / source).read_text(), page, source, config)))
    font = next(Path(__import__("ziamath").__file__).parent.rglob("STIXTwoMath-Regular.ttf"))
    files.append(File.generated(config, f"assets/{font.name}", content=font.read_bytes()))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        _notebook(file, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **kwargs: Any) -> str:
    source = page.file.src_uri
    return _spaced(markdown if source in ELSEWHERE else _relinked(markdown, source, f"docs/{source}", config))


def on_post_page(output: str, **kwargs: Any) -> str:
    """Without the mark by which the theme's script asks GitHub for the repository's stars"""
    return output.replace(' data-md-component="source"', "")


on_post_template = on_post_page  # 404.html


def _spaced(text: str) -> str:
    """With an empty line before every list, which GitHub does not need and Python-Markdown does"""
    lines, before, fenced = [], "", False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        begins = re.match(r"(- |\d+\. )", line) and before and not re.match(r"(- |\d+\. |\s)", before)
        lines += ["", line] if begins and not fenced else [line]
        before = line
    return "\n".join(lines)


def on_page_content(html: str, **kwargs: Any) -> str:
    html = NUMBER.sub(lambda found: found[1] + found[2].replace(" ", "\u00a0"), html)
    return re.sub(r'<img [^>]*?src="([^"]+)"[^>]*/?>', r'<a href="\1">\g<0></a>', MATH.sub(_mathml, html))


def _mathml(found: re.Match[str]) -> str:
    tex = html.unescape(found[2]).strip()
    math = convert(tex, display="inline" if found[1] == "span" else "block")
    unknown = re.search(r"<mi>(\\\w*|&)</mi>", math)
    if unknown:
        raise ValueError(f"latex2mathml does not know {unknown[1]} in: {tex}")
    fences = r"<mi>(&#x0?(?:27E8|27E9|230A|230B|2308|2309);)</mi>"
    bars = r"<mo>(&#x(?:02016|0007C);)</mo>"  # which, without left and right, browsers stretch as they like
    math = re.sub(fences, r'<mo stretchy="false">\1</mo>', re.sub(bars, r'<mo stretchy="false">\1</mo>', math))
    return math if found[1] == "span" else f'<div class="formula">{math}</div>'  # which scrolls on a narrow screen


def _relinked(text: str, page: str, source: str, config: MkDocsConfig) -> str:
    """Links are relative to the file in the repository. Those to what is not on the site lead to that"""
    pages = {path: name for name, path in ELSEWHERE.items()}
    pages |= {path.removesuffix("/README.md"): name for path, name in pages.items() if path.endswith("/README.md")}

    def link(found: re.Match[str]) -> str:
        label, address = found[1], found[2]
        if address.startswith(("http", "#", "mailto:")):
            return found[0]
        path, hash, anchor = address.partition("#")
        target = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        there = pages.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None or (ROOT / "docs" / there).is_dir():
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"[{label}]({config.repo_url}/{kind}/main/{target}{hash}{anchor})"
        if label.endswith(".md"):  # a file's name, which says nothing here
            label = (ROOT / target).read_text().splitlines()[0].removeprefix("# ")
        up, there = "../" * page.count("/"), re.sub(r"\.ipynb$", ".md", there)
        return f"[{label}]({up}{there}{hash}{anchor})"

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)  # prose, code, prose, ...
    parts[::2] = [re.sub(r"(?<!!)\[([^\]\n]*)\]\(([^)\s]+)\)", link, prose) for prose in parts[::2]]
    return "".join(parts)


def _notebook(file: File, files: Files, config: MkDocsConfig) -> None:
    """Replaces a notebook with the page it makes: its text, its code, and the outputs that are stored in it"""
    files.remove(file)
    name, parts = file.src_uri.removesuffix(".ipynb"), []
    for number, cell in enumerate(json.loads(Path(file.abs_src_path or "").read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                image = f"{name}-{number}.png"
                files.append(File.generated(config, image, content=base64.b64decode(data["image/png"])))
                parts.append(f"![Output of the cell above]({Path(image).name})")
            else:
                text = "".join(output.get("text") or data["text/plain"]).rstrip()
                parts.append(f"```{{.text .output}}\n{text}\n```")
    files.append(File.generated(config, f"{name}.md", content="\n\n".join(parts)))
