"""The templates beside this file, with everything escaped that comes from outside."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.units import format_bytes, format_count, format_seconds, significant


def render(template: str, **values: Any) -> Markup:
    """The template called `template`, filled with `values`, as HTML that is safe to embed."""
    return Markup(_environment().get_template(template).render(**values))


def stylesheet() -> Markup:
    """The page's one stylesheet, to stand inline."""
    environment = _environment()
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, "report.css")
    return Markup(source)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("autotune.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=lambda count: format_bytes(count).replace("-", "−"),
        count=format_count,
        rate=significant,
        seconds=format_seconds,
        sentence=_sentence,
    )
    return environment


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ")")) else ".")
