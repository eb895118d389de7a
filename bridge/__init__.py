"""Where the contract meets real engines."""
