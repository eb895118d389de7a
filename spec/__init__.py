"""What must hold: the contract as data.  Pure; needs no solver and no engine."""
