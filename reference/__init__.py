"""How a small honest runtime keeps the contract."""
