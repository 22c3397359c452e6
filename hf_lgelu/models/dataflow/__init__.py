"""What a model computes around its activations, as a graph of operations read off one forward pass."""
