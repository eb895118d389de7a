"""vLLM: its allocator and scheduler in process, and the whole engine."""
