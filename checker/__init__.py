"""Whether it holds: proofs, exploration, conformance, litmus, fuzzing, traces, reports."""
