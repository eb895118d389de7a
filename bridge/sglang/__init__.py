"""SGLang: its radix cache and token pool on a CPU, driven by a small scheduler of our own."""
