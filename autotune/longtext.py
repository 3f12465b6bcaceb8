"""Values too long for one attribute of an Optuna study (MySQL holds 64 KiB in one)."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import optuna

_CHUNK = 60_000


def write_long(study: optuna.Study, key: str, value: Any) -> None:
    """Store the JSON value under `key.0`, `key.1`, ..., deflated; the count, last, under `key`."""
    text = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    study.set_user_attr(key, 0)  # a reader meets the whole value or none
    for index, chunk in enumerate(chunks):
        study.set_user_attr(f"{key}.{index}", chunk)
    study.set_user_attr(key, len(chunks))


def read_long(study: optuna.Study, key: str) -> Any:
    """What `write_long` stored; None where there is nothing."""
    attributes = study.user_attrs
    chunks = [attributes[f"{key}.{index}"] for index in range(attributes.get(key) or 0)]
    return json.loads(zlib.decompress(base64.b64decode("".join(chunks)))) if chunks else None
