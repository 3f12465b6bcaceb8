from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runtime.errors import ModelFileError
from runtime.model_spec import call_model, first_dimension, move_batch, split_batch

Pair = namedtuple("Pair", ["left", "right"])


@given(
    step=st.integers(1, 4),
    parts=st.integers(1, 6),
    wrap=st.sampled_from(
        [
            lambda *leaves: leaves[0],
            lambda *leaves: leaves,
            lambda *leaves: list(leaves),
            lambda *leaves: dict(zip("abc", leaves, strict=True)),
            lambda *leaves: OrderedDict(x=leaves[:1], y={"z": leaves[1:]}),
            lambda *leaves: Pair(leaves[0], leaves[1:]),
        ]
    ),
)
def test_split_batch_cuts_what_has_the_batch_dimension(step: int, parts: int, wrap: Any) -> None:
    size = step * parts
    rows = torch.arange(3 * size).reshape(size, 3)
    other = torch.ones(size + 1, size)
    batch = wrap(rows, other, "text")
    pieces = split_batch(batch, size, parts)
    assert len(pieces) == parts
    columns = [tree_leaves(piece) for piece in pieces]
    assert torch.equal(torch.cat([leaves[0] for leaves in columns]), rows)
    for piece, leaves in zip(pieces, columns, strict=True):
        assert type(piece) is type(batch)
        assert leaves[0].shape == (step, 3)
        assert leaves[0].untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert leaves[1:] == tree_leaves(batch)[1:]


def test_split_batch_refuses_unequal_parts() -> None:
    with pytest.raises(ValueError, match=r"`size % parts == 0` must hold, but got \(size=4, parts"):
        split_batch(torch.ones(4), 4, 3)


def test_first_dimension_and_move() -> None:
    batch = {"a": torch.ones(4, 2), "b": (torch.ones(5), torch.ones(()), "x"), "c": None}
    assert first_dimension(batch) == {4, 5}
    moved = move_batch(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][2] == "x"
    assert moved["c"] is None


class Echo(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return args, kwargs


def test_call_model() -> None:
    one = torch.ones(1)
    assert call_model(Echo(), one) == ((one,), {})
    assert call_model(Echo(), (one, 2)) == ((one, 2), {})
    assert call_model(Echo(), [one, 2]) == ((one, 2), {})
    assert call_model(Echo(), {"a": one}) == ((), {"a": one})
    assert call_model(Echo(), UserDict(a=one)) == ((), {"a": one})
    with pytest.raises(ModelFileError, match="tensor, dict or tuple, but got str"):
        call_model(Echo(), "text")
