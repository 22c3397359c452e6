"""What can be said of a network: how far a swap takes it, its linear pieces, zeros, proofs, int8."""
