"""A system prompt that stays in the cache under load, because somebody claimed it.

python examples/pinned_system_prompt.py
"""

from __future__ import annotations

from typing import Any

from engine import BLOCK, ask, engine, text

from kvclaims.bridge.serving.client import LocalClaims

SYSTEM = text(1, 20)


def reused_after_load(llm: Any, user: int) -> int:
    """Blocks of the system prompt that are found again after others have filled the pool."""
    ask(llm, SYSTEM + text(user, 1))
    for other in range(3):
        ask(llm, text(100 + other, 45))
    return int(ask(llm, SYSTEM + text(user + 1, 1)).num_cached_tokens) // BLOCK


def main(llm: Any) -> None:
    claims = LocalClaims(llm, owner="team-a")
    without = reused_after_load(llm, user=10)
    answer = claims.declare("system-prompt", SYSTEM, duration=3600)
    kept = reused_after_load(llm, user=20)
    claims.release("system-prompt")
    print(f"without a claim, {without} of 20 blocks were found again")
    print(f"the claim was {answer['decision']}: {answer['reason']}")
    print(f"with it, {kept} of 20 blocks were found again")


if __name__ == "__main__":
    main(engine())
