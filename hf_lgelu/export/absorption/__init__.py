"""λ absorbed by the weights around each activation: the data flow, the factors, the change."""
