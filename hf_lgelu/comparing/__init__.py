"""Networks compared on the same inputs: how far their outputs are apart, their scores, and their zeros."""
