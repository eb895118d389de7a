"""An agent that calls a tool, waits, and goes on where it stopped.

The first request claims its own prompt for a minute; while the tool runs, the pool is busy; the
agent renews when the tool is slow, resumes on what it claimed, and lets go.

    python examples/pausing_agent.py
"""

from __future__ import annotations

from typing import Any

from engine import BLOCK, ask, engine, text

from kvclaims.bridge.serving.client import LocalClaims, claim_args


def main(llm: Any) -> None:
    claims = LocalClaims(llm, owner="team-a")
    conversation = text(50, 15)
    args = claim_args("agent-7", owner="team-a", duration=60)
    told = ask(llm, conversation, args).kv_transfer_params["kvclaims"]["claim"]
    print(f"claimed {told['granted_blocks']} blocks: {told['decision']}")

    for other in range(3):  # the tool runs; others are served meanwhile
        ask(llm, text(150 + other, 60))
    claims.renew("agent-7", 60)

    resumed = ask(llm, conversation + text(51, 2))
    print(f"resumed with {resumed.num_cached_tokens // BLOCK} blocks found")
    claims.release("agent-7")
    print(f"let go: {claims.inspect('agent-7')['phase']}")


if __name__ == "__main__":
    main(engine())
