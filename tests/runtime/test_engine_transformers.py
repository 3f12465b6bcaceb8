"""Models of transformers train as they are: tied, encoder-decoder, experts, caches, own losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.engine_runs import settings
from tests.runtime.hf_models import plain_loop
from tests.runtime.ranks import Ranks

pytest.importorskip("transformers")
STEPS = 3


@pytest.mark.parametrize("name", ["mixtral", "t5"])
@pytest.mark.parametrize(
    ("changes", "rtol"),
    [
        ({"zero_stage": 3, "activation_checkpointing": "full"}, 1e-5),
        ({"zero_stage": 1, "precision": "bf16", "activation_checkpointing": "selective"}, 1e-2),
    ],
)
def test_trains_as_one_process(
    two_ranks: Ranks, name: str, changes: dict[str, Any], rtol: float
) -> None:
    config = settings(**changes)
    plain = plain_loop(name, config, STEPS)
    ours = two_ranks.call("tests.runtime.hf_models:train", name=name, config=config, steps=STEPS)[0]
    assert len(ours["groups"]) == (4 if name == "t5" else 2)
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=rtol)
