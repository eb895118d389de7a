"""Two teams on one pool: each has a quota, and neither learns the other's business.

python examples/two_tenants.py
"""

from __future__ import annotations

from typing import Any

from engine import ask, engine, text

from kvclaims.bridge.serving.client import ClaimError, LocalClaims


def main(llm: Any) -> None:
    a, b = LocalClaims(llm, owner="team-a"), LocalClaims(llm, owner="team-b")
    a.declare("handbook", text(30, 40))
    try:
        b.declare("archive", text(31, 30))
    except ClaimError as refused:
        print(f"team-b asked for 30 blocks: {refused.body['reason']}")
    clipped = b.declare("archive", text(31, 30), generation=2, min_blocks=10)
    print(f"team-b asked for 10 to 30: {clipped['granted_blocks']} granted")

    ask(llm, text(30, 40))
    ask(llm, text(31, 20))
    refusal = ask(llm, text(32, 50), {"kvclaims_owner": "team-b"}).kv_transfer_params["kvclaims"]
    print(f"team-b's request of 50 blocks: {refusal['outcome']}, {refusal['shortfall']} missing")
    for blocking in refusal["blocking_claims"]:
        whose = blocking.get("owner", "somebody else")
        print(f"in its way: {blocking['blocks']} blocks of {whose}")
    print(f"team-b sees {len(b.list())} claim, the operator {len(operator(llm))}")
    a.release("handbook")
    b.release("archive")


def operator(llm: Any) -> list[dict[str, Any]]:
    listed = LocalClaims(llm, operator=True).list()
    return [c for c in listed if c["phase"] == "materialized"]


if __name__ == "__main__":
    main(engine())
