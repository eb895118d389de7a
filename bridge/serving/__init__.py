"""Claims as a service: settings, the desk that decides them, HTTP, a client, metrics and traces.

Nothing here imports an engine; `kvclaims.bridge.vllm.serving` puts the desk into a live vLLM.
"""
