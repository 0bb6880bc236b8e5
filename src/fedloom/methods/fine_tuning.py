"""Fine-tuning of a shared model for evaluation."""

from __future__ import annotations

from typing import Literal

from fedloom.spec.method import Method
from fedloom.spec.parts import Phase, Receive

Part = Literal["all", "head", "body"]


def fine_tuned(method: Method, owner: str, epochs: int, part: Part) -> Method:
    """The method whose clients train some epochs before their model is evaluated or used; the result is discarded."""
    if not epochs:
        return method
    still = "body" if part == "head" else None
    tune = Phase(name="finetune", leaves=part, epochs=epochs, stream="finetune", thaw=True, eval_norm=still)
    return method.replacing_schedule(owner, adapt=(Receive(), tune))
