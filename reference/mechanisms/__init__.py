"""Mechanisms that change KV, each small, on real tensors, behind `spec.fidelity.Mechanism`.

Written from the papers' descriptions to be measured, not to be fast: `kvclaims lower --mechanism`.
"""
